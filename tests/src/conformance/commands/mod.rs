//! The commands, by subject: each makes its one call, and tells the answer.
//!
//! # Safety
//! Outputs are the command's own, and host memory that queued work may use is never given back. Everything else is a
//! number that the check chose: what a driver makes of it is the question, which is why a GPU is asked in a process of
//! its own.
#![allow(unsafe_code)]

/// Makes the call of that name.
macro_rules! call {
    ($args:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let driver = $args.driver();
        // SAFETY: as this module says: outputs are ours, and what else is passed on is the question.
        unsafe { driver.$name($($argument),*) }
    }};
}

mod arguments;
mod context;
mod copy;
mod graph;
mod host;
mod kernel;
mod memory;
mod pointer;
mod share;
mod stream;

use std::sync::Arc;

pub(crate) use arguments::{Args, Reply};

use super::parse::Command;
use super::run::Answer;
use super::scene::Scene;

/// A command of the table.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// Whether it makes a call, and so answers a code.
    pub(crate) makes_call: bool,
    run: Run,
}

type Run = fn(&mut Args<'_>) -> Result<Reply, String>;

impl Entry {
    const fn call(name: &'static str, run: Run) -> Self {
        Self { name, makes_call: true, run }
    }

    const fn other(name: &'static str, run: Run) -> Self {
        Self { name, makes_call: false, run }
    }
}

const TABLES: &[&[Entry]] = &[
    memory::TABLE,
    share::TABLE,
    pointer::TABLE,
    context::TABLE,
    stream::TABLE,
    copy::TABLE,
    kernel::TABLE,
    graph::TABLE,
    host::TABLE,
];

/// The command of that name.
pub(crate) fn find(name: &str) -> Option<&'static Entry> {
    TABLES.iter().copied().flatten().find(|entry| entry.name == name)
}

/// Does a command, and keeps its output.
pub(crate) fn execute(scene: &Arc<Scene>, command: &Command) -> Result<Answer, String> {
    let entry = find(&command.name).ok_or_else(|| format!("no such command: {}", command.name))?;
    let mut args = Args::new(scene, &command.arguments);
    let reply = (entry.run)(&mut args)?;
    args.require_used()?;
    if let Some(name) = &command.output {
        let value = reply.value.ok_or_else(|| format!("{} has no output", command.name))?;
        scene.variables.lock().unwrap().insert(name.clone(), value);
    }
    let told = if command.output.is_some() { "" } else { &reply.told };
    let text = match reply.code {
        Some(code) if told.is_empty() => code.0.to_string(),
        Some(code) => format!("{} {told}", code.0),
        None if told.is_empty() => "0".to_owned(),
        None => told.to_owned(),
    };
    Ok(Answer::of(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_name_of_its_own_and_is_documented() {
        let readme = include_str!("../../../conformance/README.md");
        let mut names: Vec<&str> = TABLES.iter().copied().flatten().map(|entry| entry.name).collect();
        for name in &names {
            assert!(readme.contains(&format!("`{name}")), "README.md has nothing on `{name}`");
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "two commands of one name");
    }
}
