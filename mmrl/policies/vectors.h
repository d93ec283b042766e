// What code of ours for CPUs with AVX-512 shares; native.py puts it before every source it builds.
#include <immintrin.h>

namespace vectors {

using Vec = __m512;  // 16 numbers

// The first n of 16 numbers.
inline __mmask16 below(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

// e^x within 2 units in the last place, for x between -87 and 88.
inline Vec power(Vec x) {
  const Vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  Vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Vec y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(_mm512_mul_ps(r, r), y, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(y, n);
}

}  // namespace vectors
