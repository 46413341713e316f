//! The files and the metadata of the workspace, for the rules to read.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

/// Folders that hold nothing of ours: git's, and what `.gitignore` names.
const NOT_OURS: &[&str] = &[".git", "target", "bundle"];

/// A text file of the workspace.
pub(crate) struct File {
    /// Relative to the root, with `/` between its parts.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    // As cargo says now: what was compiled may be another checkout's, where two have one target folder.
    let xtask = env::var_os("CARGO_MANIFEST_DIR").unwrap();
    Path::new(&xtask).parent().unwrap().to_owned()
}

/// Every file of the workspace that is text, in order of path.
pub(crate) fn files() -> Vec<File> {
    let root = root();
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            let kind = entry.file_type().unwrap();
            if NOT_OURS.iter().any(|name| entry.file_name() == *name) {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let relative = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                let text = String::from_utf8(fs::read(&path).unwrap());
                files.extend(text.ok().map(|text| File { path: relative, text }));
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(files.iter().any(|file| file.path == "xtask/src/main.rs"), "the walk missed a file");
    files
}

/// The files whose name ends in `.rs`.
pub(crate) fn rust_files() -> impl Iterator<Item = File> {
    files().into_iter().filter(|file| file.path.ends_with(".rs"))
}

/// The packages of the workspace, as `cargo metadata` describes them.
pub(crate) fn packages() -> Vec<Value> {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Fails with every violation, one a line.
#[track_caller]
pub(crate) fn assert_none(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}:\n  {}", violations.join("\n  "));
}
