//! House rules that a reader relies on, kept by a test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

fn rust_files(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

fn sources(below: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    rust_files(&root.join(below), &mut files);
    files.sort();
    assert!(!files.is_empty());
    let name = |p: &Path| p.strip_prefix(root).unwrap().display().to_string();
    files.iter().map(|p| (name(p), fs::read_to_string(p).unwrap())).collect()
}

/// The part of a file before its unit tests.
fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

/// Code lines: without comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    without_tests(text).lines().filter(|l| !l.trim_start().starts_with("//"))
}

#[test]
fn the_engine_reads_no_clock_takes_no_lock_and_awaits_nothing() {
    const FORBIDDEN: [&str; 13] = [
        "async ",
        ".await",
        "tokio",
        "Mutex",
        "RwLock",
        "std::thread",
        "Instant",
        "SystemTime",
        "Atomic",
        "std::fs",
        "std::net",
        "rand::rng",
        "HashMap",
    ];
    for (name, text) in sources("src/engine") {
        for line in code(&text) {
            let bad = FORBIDDEN.iter().find(|word| line.contains(**word));
            assert_eq!(bad, None, "{name}: {line}");
        }
    }
}

#[test]
fn every_engine_file_opens_with_its_five_labels() {
    for (name, text) in sources("src/engine") {
        if name.ends_with("mod.rs") || name.ends_with("search.rs") {
            continue;
        }
        for label in ["What", "Invariant", "Time and units", "Bounds", "Source"] {
            assert!(text.contains(&format!("//! - **{label}**")), "{name} lacks {label}");
        }
    }
}

#[test]
fn no_file_is_longer_than_six_hundred_lines_without_its_tests() {
    for (name, text) in sources("src") {
        let lines = without_tests(&text).lines().count();
        assert!(lines <= 600, "{name}: {lines} lines");
    }
}

#[test]
fn there_is_no_unsafe_code_and_no_switched_off_test() {
    for below in ["src", "examples", "tests", "benches"] {
        for (name, text) in sources(below) {
            if name.ends_with("tidy.rs") {
                continue;
            }
            for line in text.lines() {
                let bad = ["unsafe {", "unsafe fn", "#[ignore", "todo!(", "dbg!("];
                assert!(!bad.iter().any(|b| line.contains(b)), "{name}: {line}");
            }
        }
    }
}
