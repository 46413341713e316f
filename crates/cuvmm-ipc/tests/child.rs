//! The socket that a child process is started with. Each test begins itself again as that child.
//!
//! # Safety
//! The socket is taken by the child's only test, and nothing else there takes a file by its number but the standard
//! streams.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cuvmm_ipc::{Error, Limits, PeerIdentity, inherited_socket, receive_buffer, send_buffer, spawn_with_socket};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use process::{Other, again, alone, part};
use simulated::{Bench, assert_reads, grown, write};
use support::{OpenFiles, soon};

fn inherited() -> Result<UnixStream, Error> {
    // SAFETY: as the file says.
    unsafe { inherited_socket() }
}

/// The reason why there is no socket.
fn missing() -> &'static str {
    match inherited() {
        Err(Error::NotInherited { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

/// This test once more, with a socket.
fn start(test: &str) -> (Other, UnixStream) {
    let (child, socket) = spawn_with_socket(again(test, "child")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (child.into(), socket)
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdout(Stdio::null());
    command
}

#[test]
fn a_child_receives_a_buffer() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if part().is_some() {
        let socket = inherited().unwrap();
        let imported = receive_buffer(&socket, &resource, &Limits::default(), soon()).unwrap();
        assert_reads(&imported, 1);
        write(&imported, 2);
    } else {
        let (child, socket) = start("a_child_receives_a_buffer");
        assert_eq!(PeerIdentity::of(&socket).unwrap().pid, std::process::id(), "who made the pair");
        let buffer = grown(&resource, 40);
        write(&buffer, 1);
        send_buffer(&socket, &buffer, soon()).unwrap();
        child.finish();
        assert_reads(&buffer, 2);
    }
}

#[test]
fn the_end_of_a_child_is_the_end_of_the_connection() {
    if alone("the_end_of_a_child_is_the_end_of_the_connection") {
        let files = OpenFiles::watch();
        let (mut child, mut socket) = spawn_with_socket(shell("exit 0")).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap(), 0, "this process has no copy of the child's end");
        assert!(child.wait().unwrap().success());
        drop((child, socket));
        files.assert_unchanged();
    }
}

/// Whoever has a copy of the child's end keeps the connection from ending.
#[test]
fn no_other_child_gets_the_socket() {
    let (is_over, begin) = (AtomicBool::new(false), Barrier::new(3));
    thread::scope(|scope| {
        let others = [(); 2].map(|()| {
            scope.spawn(|| {
                let mut others = Vec::new();
                begin.wait();
                while !is_over.load(Ordering::Relaxed) && others.len() < 200 {
                    others.push(Other::from(Command::new("sleep").arg("60").spawn().unwrap()));
                }
                others
            })
        });
        begin.wait();
        for _ in 0..50 {
            let (mut child, mut socket) = spawn_with_socket(shell("exit 0")).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            child.wait().unwrap();
            assert_eq!(socket.read(&mut [0]).unwrap(), 0);
        }
        is_over.store(true, Ordering::Relaxed);
        for others in others {
            assert!(!others.join().unwrap().is_empty());
        }
    });
}

#[test]
fn a_program_that_is_not_there_leaves_nothing() {
    if alone("a_program_that_is_not_there_leaves_nothing") {
        let files = OpenFiles::watch();
        let error = spawn_with_socket(Command::new("/nonexistent/program")).unwrap_err();
        assert_eq!(error.to_string(), "failed to start a program (/nonexistent/program)");
        let Error::Os { operation: "start a program", path, source } = error else { panic!("{error}") };
        assert_eq!((path, source.kind()), (Some("/nonexistent/program".into()), std::io::ErrorKind::NotFound));
        files.assert_unchanged();
    }
}

#[test]
fn a_socket_is_inherited_once_and_by_no_child_of_the_child() {
    const TEST: &str = "a_socket_is_inherited_once_and_by_no_child_of_the_child";
    match part().as_deref() {
        Some("child") => {
            let mut socket = inherited().unwrap();
            let flags = FdFlag::from_bits_truncate(fcntl(socket.as_fd(), FcntlArg::F_GETFD).unwrap());
            assert!(flags.contains(FdFlag::FD_CLOEXEC));
            assert_eq!(missing(), "the file that CUVMM_SOCKET names was not inherited, or was taken");
            Other::start(TEST, "grandchild").finish();
            // Nor another that comes to have the number, also where it is inherited.
            let (number, other) = (socket.as_raw_fd(), support::pair());
            assert_eq!(socket.write(b"!").unwrap(), 1);
            drop(socket);
            assert_eq!(fcntl(&other.0, FcntlArg::F_DUPFD(number)).unwrap(), number);
            assert_eq!(missing(), "it was taken");
        }
        Some(_) => assert_eq!(missing(), "the file that CUVMM_SOCKET names is not open"),
        None => {
            let (child, mut socket) = start(TEST);
            socket.read_exact(&mut [0]).unwrap();
            child.finish();
        }
    }
}

#[test]
fn what_was_not_inherited_is_refused_and_left_as_it_is() {
    const TEST: &str = "what_was_not_inherited_is_refused_and_left_as_it_is";
    let variable = || std::env::var("CUVMM_SOCKET").unwrap();
    let run = |part: &str, value: Option<&str>, script: &str| {
        let program = again(TEST, part);
        let mut command = shell(&format!("{script} exec \"$0\" \"$@\""));
        command.arg(program.get_program()).args(program.get_args()).env("CUVMM_IPC_PART", part).stdout(Stdio::piped());
        match value {
            Some(value) => command.env("CUVMM_SOCKET", value),
            None => command.env_remove("CUVMM_SOCKET"),
        };
        Other::from(command.spawn().unwrap()).finish();
    };
    match part().as_deref() {
        None => {
            run("unset", None, "");
            for value in ["", "x", "-1", "7x", "99999999999", "3.0"] {
                run("no number", Some(value), "");
            }
            run("closed", Some("900"), "");
            run("file", Some("9"), "exec 9</dev/null;");
            run("own file", Some("800"), "");
            run("datagrams", Some("800"), "");
        }
        Some("unset") => assert_eq!(missing(), "CUVMM_SOCKET is not set"),
        Some("no number") => assert_eq!(missing(), "CUVMM_SOCKET is no number of a file", "{}", variable()),
        Some("closed") => assert_eq!(missing(), "the file that CUVMM_SOCKET names is not open"),
        Some("file") => {
            assert!(matches!(inherited(), Err(Error::Os { source, .. }) if source.raw_os_error() == Some(88)));
            assert!(std::fs::read_link("/proc/self/fd/9").unwrap().ends_with("null"));
        }
        Some("own file") => {
            let file = File::open("/dev/null").unwrap();
            fcntl(&file, FcntlArg::F_DUPFD_CLOEXEC(800)).unwrap();
            assert_eq!(missing(), "the file that CUVMM_SOCKET names was not inherited, or was taken");
        }
        Some(_) => {
            let (socket, _other) = UnixDatagram::pair().unwrap();
            fcntl(&socket, FcntlArg::F_DUPFD(800)).unwrap();
            assert!(matches!(inherited(), Err(Error::NotUnixStream)));
            let flags = std::fs::read_to_string("/proc/self/fdinfo/800").unwrap();
            let is_closed_on_exec = |line: &str| line.starts_with("flags:") && line.ends_with("2000002");
            assert!(!flags.lines().any(is_closed_on_exec), "{flags}");
        }
    }
}

/// The lowest free numbers would be those of the standard streams, which the child gets others at.
#[test]
fn a_program_without_standard_streams_gives_its_child_a_socket_too() {
    if alone("a_program_without_standard_streams_gives_its_child_a_socket_too") {
        // What the test says goes to the one between.
        nix::unistd::close(0).unwrap();
        nix::unistd::close(2).unwrap();
        let mut command = shell("test -S /proc/self/fd/$CUVMM_SOCKET");
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let (mut child, _socket) = spawn_with_socket(command).unwrap();
        assert!(child.wait().unwrap().success());
    }
}
