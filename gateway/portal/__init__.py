"""Who signs in with a browser: people, their roles, sessions, and the pages at `/portal`.

1. A person signs in with a password, a one-time link or at an OpenID provider (`sign_in`, `openid`). Every sign-in
   makes a new session (`sessions`) in Redis; the browser has a random token, Redis its hash.
2. `door.Door.enter` turns a request into a `door.Visit`: the person, the organisation and the role in it as Postgres
   has them at this moment, or sends the browser to the sign-in page.
3. What a role may do is one table (`roles`). What changes something goes through `door.Door.form`, which checks that
   the form is ours.
4. `transport.guard_pages` is around every page: no plain http, strict headers.
"""
