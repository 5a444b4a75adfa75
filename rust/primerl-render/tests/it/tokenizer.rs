//! The two libraries, and decoding by pieces.

use primerl_render::testing::{CHATML, IM_END, write_model, write_tiny_model};
use primerl_render::{BackendChoice, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::LazyLock;

const ADDED: [(&str, bool); 5] = [
    ("<|im_end|>", true),
    ("<|im_start|>", true),
    ("user", false),
    ("<|im", false),
    ("né", false),
];
const MERGES: [(&str, &str); 8] = [
    (" ", " "),
    ("\n", "\n"),
    ("t", "h"),
    ("th", "e"),
    (" ", "the"),
    ("1", "2"),
    ("12", "3"),
    ("a", "b"),
];

fn load(folder: &Path) -> Tokenizer {
    Tokenizer::load(&folder.join("tokenizer.json")).expect("loads")
}

/// A folder with the tokenizer of these tokens.
fn merging_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_model(
        folder.path(),
        &ADDED,
        &MERGES,
        CHATML,
        "<|im_end|>",
        "<|im_end|>",
    )
    .expect("written");
    folder
}

static MERGING: LazyLock<Tokenizer> = LazyLock::new(|| load(merging_folder().path()));

const METASPACE_SIZE: u32 = 267;

/// The same, with bytes as a fallback of a vocabulary of words with `▁`, as Llama 2's.
static METASPACE: LazyLock<Tokenizer> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("temporary folder");
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["<unk>", "<s>", "</s>"]
        .map(str::to_owned)
        .into_iter()
        .chain(bytes);
    let letters = ["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab"].map(str::to_owned);
    let vocabulary: Value = words
        .chain(letters)
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "pre_tokenizer": null,
        "added_tokens": [{"id": 2, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": [["▁", "a"], ["a", "b"], ["▁", "ab"]]},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    load(folder.path())
});

fn reference() -> tokenizers_stable::Tokenizer {
    let folder = merging_folder();
    tokenizers_stable::Tokenizer::from_file(folder.path().join("tokenizer.json")).expect("loads")
}

static REFERENCE: LazyLock<tokenizers_stable::Tokenizer> = LazyLock::new(reference);

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.decode_stream(skip_special);
    let mut text: String = ids
        .iter()
        .map(|&id| stream.push(id).expect("decodes"))
        .collect();
    text.push_str(&stream.finish().expect("decodes"));
    text
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        any::<String>(),
        "[ \\n\\tthe12345ab<|>]{0,16}",
        prop::sample::select(vec![
            "<|im_end|>",
            "<|im",
            "user",
            "é",
            "né",
            "e\u{301}",
            "你好",
            "👩‍👩‍👧",
            "\u{fffd}",
            "  \n\n "
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn both_libraries_give_the_same_ids(text in text()) {
        prop_assert_eq!(MERGING.backend(), &BackendChoice::Fast);
        let expected = REFERENCE.encode_fast(text.as_str(), false).expect("encodes").get_ids().to_vec();
        let ids = MERGING.encode(&text).expect("encodes");
        prop_assert_eq!(&ids, &expected);
        prop_assert_eq!(MERGING.decode(&ids, false).expect("decodes"), text);
    }

    /// Also for ids that no text encodes to, with characters cut anywhere.
    #[test]
    fn pieces_add_up_to_the_whole(ids in prop::collection::vec(0u32..272, 0..64), skip_special: bool) {
        let whole = MERGING.decode(&ids, skip_special).expect("decodes");
        prop_assert_eq!(streamed(&MERGING, &ids, skip_special), whole);
    }

    /// The same for a vocabulary of SentencePiece, whose bytes are tokens of their own.
    #[test]
    fn pieces_add_up_whatever_the_bytes(
        ids in prop::collection::vec(0..METASPACE_SIZE, 0..64),
        skip_special: bool,
    ) {
        let whole = METASPACE.decode(&ids, skip_special).expect("decodes");
        prop_assert_eq!(streamed(&METASPACE, &ids, skip_special), whole);
    }

    #[test]
    fn no_piece_holds_half_a_character(text in text()) {
        let ids = MERGING.encode(&text).expect("encodes");
        let mut stream = MERGING.decode_stream(false);
        let mut so_far = String::new();
        for id in ids {
            so_far.push_str(&stream.push(id).expect("decodes"));
            prop_assert!(text.starts_with(&so_far));
        }
    }

    #[test]
    fn pieces_add_up_where_tokens_are_not_bytes(text in "[abcé 你👍]{0,24}") {
        let ids = METASPACE.encode(&text).expect("encodes");
        prop_assert_eq!(streamed(&METASPACE, &ids, true), METASPACE.decode(&ids, true).expect("decodes"));
    }
}

#[test]
fn no_text_is_lost_beside_bytes_that_are_none() {
    let byte = |byte: u32| 3 + byte;
    // `é` in bytes, then a byte that begins nothing, then a word.
    let ids = [byte(0xc3), byte(0xa9), byte(0xff), 264, 260];
    for skip_special in [true, false] {
        let text = METASPACE.decode(&ids, skip_special).expect("decodes");
        assert_eq!(text, "é\u{fffd} aa");
        assert_eq!(streamed(&METASPACE, &ids, skip_special), text);
    }
    assert_eq!(METASPACE.decode(&[264, 264], true).expect("decodes"), "a a");
}

#[test]
fn special_tokens_can_be_left_out() {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tiny_model(folder.path()).expect("written");
    let tokenizer = load(folder.path());
    let ids = tokenizer.encode("a<|im_end|>user").expect("encodes");
    assert_eq!(ids, [64, IM_END, 260]);
    assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), "auser");
    assert_eq!(
        tokenizer.decode(&ids, false).expect("decodes"),
        "a<|im_end|>user"
    );
    assert_eq!(
        tokenizer.decode(&[262, 99_999], false).expect("decodes"),
        "",
        "ids without a token have no text"
    );
}

#[test]
fn a_file_only_the_reference_reads_is_used_with_the_reason() {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tiny_model(folder.path()).expect("written");
    let path = folder.path().join("tokenizer.json");
    let mut file: Value =
        serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
    // Dropout makes ids random, so the fast library refuses it.
    file["model"]["dropout"] = json!(0.0001);
    std::fs::write(&path, file.to_string()).expect("written");
    let tokenizer = load(folder.path());
    let BackendChoice::Stable { reason } = tokenizer.backend() else {
        panic!("{:?}", tokenizer.backend())
    };
    assert!(!reason.is_empty());
    assert_eq!(
        tokenizer.encode("a<|im_end|>").expect("encodes"),
        [64, IM_END]
    );
}

#[test]
fn truncation_in_the_file_does_not_cut_prompts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tiny_model(folder.path()).expect("written");
    let path = folder.path().join("tokenizer.json");
    let mut file: Value =
        serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
    file["truncation"] =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(&path, file.to_string()).expect("written");
    assert_eq!(
        load(folder.path())
            .encode("aaaaaaaaaa")
            .expect("encodes")
            .len(),
        10
    );
}
