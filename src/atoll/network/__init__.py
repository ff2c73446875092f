"""What a sandbox may reach: the policy, the pure decision, and the gateway that enforces it.

`policy`, `names` and `decision` touch nothing. The rest is one process for each installation, the gateway: it makes the
sandboxes' links, answers their DNS, and carries their connections, or refuses and writes down why.
"""
