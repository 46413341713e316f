//! [`Peer`]: a second process that runs another part of the same test.

use std::io::stdin;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use crate::backend::Backend;

/// Names the part that a process plays.
const ROLE: &str = "CUVMM_TESTS_ROLE";

/// A second process, which plays a part of the test that started it. It is killed when dropped.
pub struct Peer {
    child: Child,
    /// The socket between the two.
    pub socket: UnixStream,
}

impl Peer {
    /// Starts this test once more in a process of its own, to play `role` there.
    pub fn start(backend: &Backend, role: &str) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a socket pair");
        let child = Command::new(std::env::current_exe().expect("this program's file"))
            .args(["--exact", backend.test(), "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a second process");
        Self { child, socket }
    }

    /// The part that this process plays, and its socket; none in the process that the test began in.
    pub fn role() -> Option<(String, UnixStream)> {
        let role = std::env::var(ROLE).ok()?;
        let socket = stdin().as_fd().try_clone_to_owned().expect("a socket at standard input");
        Some((role, UnixStream::from(socket)))
    }

    /// Waits for its end, which must be a good one.
    pub fn join(mut self) {
        let status = self.child.wait().expect("the second process's end");
        assert!(status.success(), "the second process failed: {status}");
    }

    /// Kills it and waits for its end.
    pub fn kill(mut self) {
        self.child.kill().expect("a process to kill");
        self.child.wait().expect("the second process's end");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
