"""Options of every verb, protocol and task: declared, parsed and checked."""
