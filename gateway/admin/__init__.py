"""The admin API, `/admin/v1/…`: everything that the portal's pages do, for programs.

Callers are an admin key, or a signed-in browser with the role (`callers`). Operators, and admin keys of the
organisation that runs the fleet, act on every organisation; everybody else sees only its own, and of another one not
even that it exists. Money is written by billing (`money`).
"""
