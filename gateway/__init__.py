"""The pdgate gateway process."""
