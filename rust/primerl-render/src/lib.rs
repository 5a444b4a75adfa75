//! Messages to tokens and back: chat templates, tokenizers, extension of a recorded conversation.
