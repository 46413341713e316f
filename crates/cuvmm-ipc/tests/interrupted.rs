//! Named sockets beside signals, and in a forked child.
//!
//! # Safety
//! The handler does nothing. A child that is forked here drops what it has and ends by `_exit`: it needs nothing that
//! another thread could have held.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_ipc::{AllowedPeers, Error, Listener, connect};
use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use support::soon;

static HANDLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

/// Runs `work` on a thread that is interrupted all the time, until it is done, and `meanwhile` once it was interrupted
/// some times.
fn interrupted<T: Send>(work: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
    let action = SigAction::new(SigHandler::Handler(count), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler adds to a number.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    thread::scope(|scope| {
        let (begun, worker) = std::sync::mpsc::channel::<Pthread>();
        let working = scope.spawn(move || {
            begun.send(pthread_self()).unwrap();
            work()
        });
        let worker = worker.recv().unwrap();
        let handled = HANDLED.load(Ordering::Relaxed);
        let mut meanwhile = Some(meanwhile);
        while !working.is_finished() {
            pthread_kill(worker, Signal::SIGUSR1).unwrap();
            thread::sleep(Duration::from_millis(2));
            if HANDLED.load(Ordering::Relaxed) >= handled + 10 {
                meanwhile.take().into_iter().for_each(|meanwhile| meanwhile());
            }
        }
        assert!(meanwhile.is_none(), "done before it was interrupted");
        working.join().unwrap()
    })
}

fn own() -> AllowedPeers {
    AllowedPeers::default()
}

/// A listener whose queue is full.
fn full() -> (Listener, Vec<std::os::unix::net::UnixStream>) {
    let listener = Listener::private(own()).unwrap();
    rustix::net::listen(&listener, 2).unwrap();
    let clients = (0..3).map(|_| connect(listener.path(), &own(), soon()).unwrap()).collect();
    (listener, clients)
}

#[test]
fn signals_end_no_wait() {
    let listener = Listener::private(own()).unwrap();
    let mut client = None;
    let accepted =
        interrupted(|| listener.accept(soon()), || client = Some(connect(listener.path(), &own(), soon()).unwrap()));
    accepted.unwrap();

    let (listener, _clients) = full();
    let connected = interrupted(|| connect(listener.path(), &own(), soon()), || drop(listener.accept(soon()).unwrap()));
    connected.unwrap();

    // And none goes on for ever.
    let ((listener, _clients), idle) = (full(), Listener::private(own()).unwrap());
    let since = Instant::now();
    // Long enough to be interrupted so often on a machine that is busy.
    let in_time = || Instant::now() + Duration::from_secs(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let connected = interrupted(|| connect(listener.path(), &own(), in_time()), || ());
            assert!(matches!(connected, Err(Error::Timeout { .. })), "{connected:?}");
        });
        let accepted = interrupted(|| idle.accept(in_time()), || ());
        assert!(matches!(accepted, Err(Error::Timeout { .. })), "{accepted:?}");
    });
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

#[test]
fn a_forked_child_that_drops_a_listener_removes_nothing() {
    let path = std::env::temp_dir().join(format!("cuvmm-ipc-forked-{}", std::process::id()));
    let listeners = (Listener::bind(&path, own()).unwrap(), Listener::private(own()).unwrap());
    // SAFETY: the child does what the file says.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            drop(listeners);
            // SAFETY: ends the process, whatever others hold.
            unsafe { nix::libc::_exit(0) }
        }
        ForkResult::Parent { child } => drop(waitpid(child, None).unwrap()),
    }
    for listener in [&listeners.0, &listeners.1] {
        let _client = connect(listener.path(), &own(), soon()).unwrap();
        listener.accept(soon()).unwrap();
    }
    let second = Listener::bind(&path, own());
    assert!(matches!(second, Err(Error::AddressInUse { .. })), "{second:?}");
    drop(listeners);
    assert!(!path.exists());
}
