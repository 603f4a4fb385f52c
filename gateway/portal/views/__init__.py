"""The pages that people see once they are signed in: `view_routes` is all of them.

Each handler enters with the right that its page needs, reads for the visit's organisation alone, and shows a template.
What is in the address says what is shown, so that links can be shared.
"""
