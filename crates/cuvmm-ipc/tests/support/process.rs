//! Other processes of a test: its own program, begun again with a part to play.
#![allow(dead_code, reason = "each suite uses its part of it")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PART: &str = "CUVMM_IPC_PART";

/// The part that this process plays, where it is one that a test has begun.
pub(crate) fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// This program, to run the test of that name in a part of its own.
pub(crate) fn again(test: &str, part: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(PART, part).stdout(Stdio::piped());
    command
}

/// A process that is killed where its test fails.
pub(crate) struct Other(Child);

impl Other {
    pub(crate) fn start(test: &str, part: &str) -> Self {
        Self(again(test, part).spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it has passed that one test: a name that no test has would be a success too.
    pub(crate) fn finish(mut self) {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.0.wait().unwrap().success(), "{output}");
        assert!(output.contains("1 passed"), "{output}");
    }

    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl From<Child> for Other {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Over already, unless the test failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the test of that name in a process of its own; true inside it.
pub(crate) fn alone(test: &str) -> bool {
    if part().is_some() {
        return true;
    }
    Other::start(test, "alone").finish();
    false
}

/// A directory of a test's own, which everyone may enter.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("cuvmm-ipc-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
