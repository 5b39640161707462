collect_ignore = ["scikit_learn", "xgboost", "lightning", "hugging_face", "lora"]  # Flower apps
