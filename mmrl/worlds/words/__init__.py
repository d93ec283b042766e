"""The words world: pictures of 96 x 32 pixels with one to three short words, to teach an image
generator to spell."""
