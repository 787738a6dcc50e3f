"""Real parts that the tests drive: nodes, servers, protocol clients, users, a browser."""
