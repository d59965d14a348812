"""A model's folder: config.json and safetensors files.

adapter  low-rank deltas in PEFT's names
save     writing a model in DeepSeek's names
load     reading one, weight by weight on to the device
headers  what its files hold, compared with what they must
text     its tokenizer, and chats
tensors  the tensors of a checkpoint: names, shapes, forms
"""
