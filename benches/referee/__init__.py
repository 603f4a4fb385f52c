"""The ratio controller before a judge that is not ours: NVIDIA Dynamo's mocker, beside Dynamo's own planner."""
