"""What did the user ask for? The job file, its options and its templates, checked and immutable.

``load.load_job`` gives a ``spec.Job``; ``prompt.Prompt`` renders its rows.
"""
