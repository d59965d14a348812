"""How a cache and the weights of its layers are split over the devices of a mesh; see docs/sharding.md."""

from dsv4jax.cache.sharding import local_shards, partition_specs, shard_of, shardings
from dsv4jax.weights.params import params_specs

__all__ = ["local_shards", "params_specs", "partition_specs", "shard_of", "shardings"]
