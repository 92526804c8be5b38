"""Parts of the example job ``train_lm.py``: each file here is one idea, and the job puts them together."""
