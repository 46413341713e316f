//! [`Peer`]: a second process that runs another part of the same test.

use std::io::{Read, Write, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal::SIGKILL;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use crate::backend::Backend;

/// Names the part that a process plays.
const ROLE: &str = "CUVMM_TESTS_ROLE";
/// What a harness says that ran one test, which passed. One that knows no test of that name ends well, too.
const PASSED: &str = "test result: ok. 1 passed";
/// The only part of a test that runs in a process of its own.
const ALONE: &str = "alone";
/// Set in a process that sees the first device alone.
const SEES_ONE: &str = "CUVMM_TESTS_SEES_ONE";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// A second process, which plays a part of the test that started it. It is killed when dropped.
pub struct Peer {
    child: Child,
    /// What it writes to its standard output.
    output: Option<JoinHandle<String>>,
    /// The socket between the two.
    pub socket: UnixStream,
}

impl Peer {
    /// Starts this test once more in a process of its own, to play `role` there.
    pub fn start(backend: &Backend, role: &str) -> Self {
        Self::start_with(backend, role, |command| command)
    }

    /// As [`start`](Self::start), in a process that sees the first device alone.
    pub fn start_seeing_one(backend: &Backend, role: &str) -> Self {
        let seen = std::env::var(VISIBLE).unwrap_or_default();
        let first = seen.split(',').next().filter(|name| !name.is_empty()).unwrap_or("0").to_owned();
        Self::start_with(backend, role, |command| command.env(VISIBLE, first).env(SEES_ONE, "1"))
    }

    /// Whether this process sees the first device alone.
    pub(crate) fn sees_one() -> bool {
        std::env::var_os(SEES_ONE).is_some()
    }

    fn start_with(backend: &Backend, role: &str, change: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        let mut command = Command::new(std::env::current_exe().expect("this program's file"));
        command
            .args(["--exact", backend.test(), "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped());
        let mut child = change(&mut command).spawn().expect("a second process");
        // It has a copy of the other end.
        drop(command);
        let mut stdout = child.stdout.take().expect("its standard output");
        let output = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).expect("what the second process writes");
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Self { child, output: Some(output), socket }
    }

    /// The part that this process plays, and its socket; none in the process that the test began in.
    pub fn role() -> Option<(String, UnixStream)> {
        let role = std::env::var(ROLE).ok()?;
        let socket = stdin().as_fd().try_clone_to_owned().expect("a socket at standard input");
        Some((role, UnixStream::from(socket)))
    }

    /// Runs `body` in a process of its own, in which nothing else opens files or grows: this same test, begun again
    /// there.
    pub fn alone(backend: &Backend, body: impl FnOnce()) {
        match Self::role() {
            Some((role, _)) if role == ALONE => body(),
            Some(_) => panic!("this test has no other parts"),
            None => drop(Self::start(backend, ALONE).join()),
        }
    }

    /// Says to the other process that it may go on.
    pub fn signal(socket: &UnixStream) {
        (&*socket).write_all(b"!").expect("a peer that listens");
    }

    /// Waits for a [`signal`](Self::signal), a minute at most.
    pub fn await_signal(socket: &UnixStream) {
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket with a timeout");
        (&*socket).read_exact(&mut [0]).expect("a signal of the peer");
    }

    /// Waits for its end, which must be a good one, with the test run and passed. Returns what it wrote to its standard
    /// output.
    pub fn join(self) -> String {
        let output = self.join_early();
        assert!(output.contains(PASSED), "the second process did not run the test:\n{output}");
        output
    }

    /// Waits for its end, which must be a good one, and may come before that of the test, by [`exit`]. That it ran shows
    /// in what it sent. Returns what it wrote to its standard output.
    ///
    /// [`exit`]: std::process::exit
    pub fn join_early(mut self) -> String {
        let status = self.child.wait().expect("the second process's end");
        let output = self.output.take().map(|output| output.join().expect("what the second process wrote"));
        let output = output.unwrap_or_default();
        assert!(status.success(), "the second process failed: {status}\n{output}");
        output
    }

    /// Kills it and waits for its end. No file of it stays open here but other shares of the socket.
    pub fn kill(mut self) {
        self.child.kill().expect("a process to kill");
        self.require_killed();
    }

    /// Waits for its end by [`die`](Self::die).
    pub fn await_death(mut self) {
        self.require_killed();
    }

    fn require_killed(&mut self) {
        let status = self.child.wait().expect("the second process's end");
        let output = self.output.take().map(|output| output.join().expect("what the second process wrote"));
        assert_eq!(status.signal(), Some(SIGKILL as i32), "{}", output.unwrap_or_default());
    }

    /// Ends this process as whoever kills it would: nothing of it gets to say or to clean up anything.
    pub fn die() -> ! {
        kill(Pid::this(), SIGKILL).expect("a process to kill");
        unreachable!("a process goes on that was killed")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets this process have as many open files as it may. Memory that can be shared takes one each on the simulator, and what
/// is stranded keeps it.
pub fn allow_open_files() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit of open files");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("as many open files as there may be");
}

/// The numbers of the files that this process has open.
pub fn open_files() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("a list of open files");
    let names: Vec<_> = entries.map(|entry| entry.expect("an open file").file_name()).collect();
    let mut numbers: Vec<i32> = names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect();
    // The list itself was open while it was read.
    numbers.retain(|number| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok());
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn a_peer_that_runs_no_test_is_caught() {
        let peer = Peer::start(&Backend::open(Kind::Strict, "no::such_test"), ALONE);
        let joined = std::thread::spawn(|| peer.join()).join();
        let message = joined.unwrap_err().downcast::<String>().unwrap();
        assert!(message.starts_with("the second process did not run the test"), "{message}");
    }

    #[test]
    fn a_peer_that_runs_its_test_ends_well() {
        let backend = Backend::open(Kind::Strict, "peer::tests::a_peer_that_runs_its_test_ends_well");
        Peer::alone(&backend, || ());
    }
}
