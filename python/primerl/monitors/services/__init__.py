"""The monitors that come with primerl: a service each."""
