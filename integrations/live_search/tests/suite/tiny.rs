//! An encoder with random weights, a vocabulary of whole words, and packages, all small enough for a test.

use std::{
    error::Error,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use candle_nn::VarMap;
use live_search::{
    bert,
    encoder::{Config, Encoder},
    table,
};
use tempfile::TempDir;

pub(crate) type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

const WORDS: [&str; 16] = [
    "editor", "game", "library", "music", "text", "files", "network", "server", "font", "image", "small",
    "fast", "tool", "viewer", "data", "shell",
];

/// The kind of encoder.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Bert,
    Table,
}

/// The inputs of a run, in a folder that is deleted with it.
pub(crate) struct Tiny {
    folder: TempDir,
}

impl Tiny {
    pub(crate) fn make(kind: Kind) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let tiny = Self { folder: tempfile::tempdir()? };
        fs::create_dir(tiny.model())?;
        let vocab_size = WORDS.len() + 1;
        let config = match kind {
            Kind::Bert => Config::Bert(bert::Sizes {
                hidden_size: 16,
                intermediate_size: 32,
                layer_norm_eps: 1e-12,
                max_position_embeddings: 32,
                num_attention_heads: 2,
                num_hidden_layers: 2,
                type_vocab_size: 2,
                vocab_size,
            }),
            Kind::Table => Config::Table(table::Sizes { hidden_size: 16, vocab_size }),
        };
        let map = VarMap::new();
        Encoder::new(&config, &map)?;
        map.save(tiny.model().join("model.safetensors"))?;
        fs::write(tiny.model().join("config.json"), serde_json::to_string(&config)?)?;
        fs::write(tiny.model().join("tokenizer.json"), tokenizer().to_string())?;
        fs::write(tiny.descriptions(), descriptions(60)?)?;
        Ok(tiny)
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    pub(crate) fn descriptions(&self) -> PathBuf {
        self.folder.path().join("descriptions")
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn tokenizer() -> serde_json::Value {
    let mut vocabulary = serde_json::Map::from_iter([("[UNK]".to_owned(), 0.into())]);
    vocabulary
        .extend(WORDS.iter().enumerate().map(|(number, word)| ((*word).to_owned(), (number + 1).into())));
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]" }
    })
}

/// Packages whose two descriptions have the same three words.
fn descriptions(count: usize) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    for number in 0..count {
        let word = |of: usize| WORDS[of % WORDS.len()];
        let words = format!("{} {} {}", word(number), word(number / 16 + 3), word(number * 7 + 5));
        writeln!(text, "Package: p{number}\nDescription-en: {words} {number}")?;
        writeln!(
            text,
            " The package {number} is a {words} that has everything one needs for {words}.\n .\n Really.\n"
        )?;
    }
    Ok(text)
}
