"""SPARe: each shard type is hosted by several groups, and the survivors' stacks are reordered when groups are lost."""
