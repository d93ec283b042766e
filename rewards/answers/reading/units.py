"""Defines units of measure: their kind, and their factor of the base unit."""

from __future__ import annotations

import re
from typing import NamedTuple


class Unit(NamedTuple):
    """Holds a kind of quantity and a factor of its base unit."""

    kind: str
    factor: float

    def ratio(self, other: Unit) -> float | None:
        """Return how many of ``other`` this is; None for another kind. "pound" is weight or money,
        a degree an angle or a temperature, whichever the other is."""
        if self.kind == other.kind:
            return self.factor / other.factor
        if {self, other} in ({UNITS["deg"], UNITS["celsius"]}, {UNITS["deg"], UNITS["fahrenheit"]}):
            return 1.0
        for pound, known, way in ((self, other, 1), (other, self, -1)):
            if pound.kind == "pound" and known.kind in ("mass", "pounds"):
                factor = UNITS["lb"].factor if known.kind == "mass" else 1.0
                return float((factor / known.factor) ** way)
        return None


# kind: spellings = factor of the base unit
TABLE = """
length: nm nanometer nanometre = 1e-9 | um µm μm micron micrometer = 1e-6
 | mm millimeter millimetre millimètre milímetro millimetro 毫米 ミリ = 1e-3
 | cm centimeter centimetre zentimeter centimètre centímetro centimetro 厘米 公分
 センチ センチメートル 센티미터 см = 1e-2
 | dm decimeter decimetre = 0.1 | m meter metre mètre metro metri 米 公尺 メートル 미터 м = 1
 | km kilometer kilometre kilomètre kilómetro quilômetro kilometro chilometro chilometri 公里 千米
 キロメートル 킬로미터 км = 1e3
 | in inch " = 0.0254 | ft foot feet ' = 0.3048 | yd yard = 0.9144 | mi mile = 1609.344
 | light-year ly = 9460730472580800
mass: mg milligram = 1e-6 | g gram gramme gramm gramo grama grammo 克 グラム 그램 г = 1e-3
 | kg kilogram kilogramm kilogramo kilo chilo 千克 公斤 キログラム 킬로그램 кг = 1 | t tonne = 1e3
 | lb lbs = 0.45359237
 | oz ounce = 0.028349523125
time: ms millisecond = 1e-3 | s sec second sekunde sekunden seconde segundo secondo secondi
 秒 초 = 1
 | min minute minuten minuto minuti 分钟 分 = 60
 | h hr hour stunde stunden heure hora 小时 時間 시간 = 3600
 | day tage jour día dia 天 = 86400 | week woche wochen semaine semana = 604800
month: month = 1
year: year yr jahr jahre año ano anno anni 年 岁 歳 = 1 | decade = 10 | century centuries = 100
angle: ° deg degree grad degré grado gradi grau graus 度 = 1 | rad radian = 57.29577951308232
celsius: °C ℃ celsius 摄氏度 = 1
fahrenheit: °F ℉ fahrenheit = 1
kelvin: K kelvin = 1
area: mm² = 1e-6 | cm² 平方厘米 = 1e-4 | m² sqm 平方米 = 1
 | km² 平方公里 平方千米 = 1e6 | ha hectare = 1e4 | acre = 4046.8564224
 | in² = 0.00064516
 | ft² sqft = 0.09290304
volume: ml mL milliliter millilitre cm³ 毫升 立方厘米 = 1e-3
 | cl = 1e-2 | dl = 0.1 | l L liter litre litro litri dm³ 升 = 1
 | m³ 立方米 = 1e3
 | gal gallon = 3.785411784 | mm³ = 1e-6
speed: m/s = 1 | km/h kmh kph km/hr = 0.2777777777777778 | mph = 0.44704 | cm/s = 0.01
 | km/s = 1000 | knot = 0.5144444444444445
acceleration: m/s² = 1
force: N newton = 1 | kN = 1e3
power: mW = 1e-3 | W watt = 1 | kW kilowatt = 1e3 | MW megawatt = 1e6 | GW gigawatt = 1e9
energy: J joule = 1 | kJ = 1e3 | MJ = 1e6 | cal = 4.184 | kcal = 4184 | Wh = 3600 | kWh = 3.6e6
 | MWh = 3.6e9 | TWh = 3.6e15
voltage: mV = 1e-3 | V volt = 1 | kV = 1e3
current: mA = 1e-3 | A amp ampere = 1
resistance: Ω Ω ohm = 1 | kΩ kΩ = 1e3
frequency: Hz hertz = 1 | kHz = 1e3 | MHz = 1e6 | GHz = 1e9
pressure: Pa = 1 | hPa = 100 | kPa = 1e3 | MPa = 1e6 | bar = 1e5 | atm = 101325
 | psi = 6894.757293168361 | mmHg = 133.322387415
data: bit = 0.125 | B byte = 1 | kB KB = 1e3 | MB = 1e6 | GB = 1e9 | TB = 1e12
pixels: px pixel = 1
dollars: $ USD US$ dollar dólar dólares bucks 美元 = 1 | ¢ cent = 0.01
euros: € EUR euro 欧元 = 1
pounds: £ GBP 英镑 = 1 | p pence = 0.01
pound: pound = 1
yen: ¥ JPY yen 日元 円 = 1
rupees: ₹ INR Rs rupee = 1
yuan: 元 RMB CNY yuan = 1
won: ₩ KRW won = 1
"""


def _read() -> dict[str, Unit]:
    known: dict[str, Unit] = {}
    for line in re.sub(r"\n ", " ", TABLE).strip().split("\n"):
        kind, _, entries = line.partition(": ")
        for entry in entries.split("|"):
            names, _, factor = entry.rpartition("=")
            for name in names.split():
                known[name] = Unit(kind, float(factor))
                if len(name) > 3 and name.isalpha() and name.islower():
                    known[f"{name}s"] = known[f"{name}es"] = known[name]
                if name[-1] in "²³":
                    known[f"{name[:-1]}^{'23'['²³'.index(name[-1])]}"] = known[name]
    return known | {name: known[of] for name, of in (("days", "day"), ("inches", "inch"))}


UNITS = _read()
CURRENCIES = {
    name
    for name, unit in UNITS.items()
    if unit.kind in ("dollars", "euros", "pounds", "yen", "rupees", "yuan", "won")
    and not (name.islower() or name in ("¢", "p"))
}
PREFIX = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def unit_named(text: str) -> Unit | None:
    """Return a unit by its spelling; long names in any case, plural or not."""
    unit = UNITS.get(text)
    if unit is None and len(text) > 3:
        unit = UNITS.get(text.casefold())
    if unit is not None:
        return unit
    first, _, rest = text.casefold().partition(" ")
    if (
        first.rstrip(".") in PREFIX
        and (base := unit_named(rest.replace("foot", "feet")))
        and base.kind == "length"
    ):
        power = int(PREFIX[first.rstrip(".")])
        return Unit("area", base.factor**2) if power == 2 else Unit("volume", 1000 * base.factor**3)
    if first == "degrees" or first == "degree":
        return UNITS.get(rest)
    if " per " in text:
        above, below = (unit_named(part) for part in text.split(" per ", 1))
        if above and below and (above.kind, below.kind) == ("length", "time"):
            return Unit("speed", above.factor / below.factor)
    return None
