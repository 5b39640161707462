"""TiFL on an emulated or real fleet of unequal devices."""
