"""What a layer does with its cache: it stores new tokens, picks entries and attends to them."""
