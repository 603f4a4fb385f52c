"""The planner: should this traffic be split into prefill and decode workers, how, and what does it cost."""
