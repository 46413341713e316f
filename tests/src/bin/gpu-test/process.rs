//! A process that ends in time, with all that it started.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_tests::conformance::REPORT;
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

const POLL: Duration = Duration::from_millis(5);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Code(i32),
    Signal(Signal),
    TimedOut(Duration),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "{signal}"),
            Self::TimedOut(limit) => write!(f, "no end within {:.0?}", limit),
        }
    }
}

/// A process that has ended, and what it wrote.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) end: End,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a program to its end, or kills it after `limit`, and tells it where reports are to be left. What is left of its
/// process group is killed too: a child of a dead test must not hold the GPU.
pub(crate) fn run(program: &Path, args: &[&str], report: Option<&Path>, limit: Duration) -> io::Result<Finished> {
    // Files and not pipes: a pipe has no end while a stray child holds it.
    let mut stdout = File::from(memfd_create(c"stdout", MFdFlags::MFD_CLOEXEC)?);
    let mut stderr = File::from(memfd_create(c"stderr", MFdFlags::MFD_CLOEXEC)?);
    let mut child = Command::new(program)
        .args(args)
        // It would mix the output of tests into the lines that carry the verdicts.
        .env_remove("RUST_TEST_NOCAPTURE")
        .envs(report.map(|report| (REPORT, report)))
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .process_group(0)
        .spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);

    let end = wait(pid, limit);
    // The leader is not reaped yet, so the number still is that of its group.
    let _ = killpg(pid, Signal::SIGKILL);
    child.wait()?;
    Ok(Finished { end: end?, stdout: contents(&mut stdout)?, stderr: contents(&mut stderr)? })
}

/// Waits without reaping.
fn wait(pid: Pid, limit: Duration) -> io::Result<End> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    let start = Instant::now();
    loop {
        match waitid(Id::Pid(pid), flags) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(End::Code(code)),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Ok(End::Signal(signal)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        if start.elapsed() >= limit {
            return Ok(End::TimedOut(limit));
        }
        thread::sleep(POLL);
    }
}

/// All that was written, from the first byte.
fn contents(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn sh(script: &str, limit: Duration) -> Finished {
        run(Path::new("/bin/sh"), &["-c", script], None, limit).unwrap()
    }

    #[test]
    fn ends() {
        let check = |script: &str, limit, end: End, text: &str| {
            let finished = sh(script, limit);
            assert_eq!(finished.end, end, "{script}");
            assert_eq!(finished.end.to_string(), text);
        };
        check("exit 0", LONG, End::Code(0), "exit code 0");
        check("exit 101", LONG, End::Code(101), "exit code 101");
        check("kill -SEGV $$", LONG, End::Signal(Signal::SIGSEGV), "SIGSEGV");
        let short = Duration::from_millis(100);
        check("sleep 60", short, End::TimedOut(short), "no end within 100ms");
    }

    #[test]
    fn output_is_kept_to_the_end() {
        let finished = sh("echo out; echo err >&2; printf last; kill -KILL $$", LONG);
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\nlast", "err\n"));
    }

    #[test]
    fn a_stray_child_neither_delays_nor_survives() {
        let start = Instant::now();
        let finished = sh("sleep 60 & echo $!", LONG);
        assert!(start.elapsed() < LONG, "it waited for the child");
        let child = Pid::from_raw(finished.stdout.trim().parse().unwrap());
        // Killed, it stays a process only until its new parent has reaped it.
        let is_dead = || match std::fs::read_to_string(format!("/proc/{child}/stat")) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        while !is_dead() {
            assert!(start.elapsed() < LONG, "process {child} lives");
            thread::sleep(POLL);
        }
    }
}
