"""Simulation: the real code on a virtual clock, a simulated network and a simulated disk, all from one seed."""
