"""Environment servers: they own episodes and lead them through their stages."""
