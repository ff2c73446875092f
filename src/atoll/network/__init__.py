"""Enforces what sandboxes may reach over the network.

`decision` is pure: it decides what a policy allows. The rest belongs to the gateway, one process for each installation.
It makes the sandboxes' network links, answers their DNS queries, and carries their connections or refuses them and
records why.
"""
