//! Sockets with a name: whose path it is, and who gets in.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
mod support;

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_ipc::{AllowedPeers, Error, Limits, Listener, PeerIdentity, connect, receive};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Uid, getegid, geteuid, setresuid};
use process::{Directory, Other, alone, part, until};
use support::{OpenFiles, soon};

fn own() -> AllowedPeers {
    AllowedPeers::default()
}

fn own_uid() -> u32 {
    geteuid().as_raw()
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn is_in_use(result: Result<Listener, Error>, expect: &Path) -> bool {
    matches!(result, Err(Error::AddressInUse { path }) if path == expect)
}

/// Connects until no more may wait.
fn fill(path: &Path) -> Vec<UnixStream> {
    let mut waiting = Vec::new();
    loop {
        match connect(path, &own(), shortly()) {
            Ok(client) => waiting.push(client),
            Err(Error::Timeout { operation: "connect to a socket" }) => return waiting,
            Err(error) => panic!("{error}"),
        }
        assert!(waiting.len() < 1000, "a queue without an end");
    }
}

#[test]
fn who_connects_is_told_and_both_ends_are_closed_on_exec() {
    let listener = Listener::private(own()).unwrap();
    let ours = connect(listener.path(), &own(), soon()).unwrap();
    let (theirs, peer) = listener.accept(soon()).unwrap();
    let expect = (std::process::id(), own_uid(), getegid().as_raw());
    assert_eq!((peer.pid, peer.uid, peer.gid), expect);
    assert_eq!(PeerIdentity::of(&ours).unwrap(), peer);
    for file in [listener.as_fd(), ours.as_fd(), theirs.as_fd()] {
        let flags = FdFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }
    assert_eq!(ours.write_timeout().unwrap(), None, "what the connect waited with");
}

#[test]
fn an_own_user_that_is_not_named_is_denied_at_either_end() {
    if alone("an_own_user_that_is_not_named_is_denied_at_either_end") {
        let files = OpenFiles::watch();
        let directory = Directory::new("denied");
        let path = directory.join("socket");
        let others = own().uid(own_uid() + 1);
        let listener = Listener::bind(&path, others.clone()).unwrap();
        let ours = connect(&path, &own(), soon()).unwrap();
        let error = listener.accept(soon()).unwrap_err();
        let expect = (std::process::id(), own_uid(), getegid().as_raw());
        assert!(matches!(error, Error::PeerDenied { pid, uid, gid } if (pid, uid, gid) == expect), "{error}");
        let error = receive(&ours, &Limits::default(), soon()).unwrap_err();
        assert!(matches!(error, Error::Closed { .. }), "{error}");
        let error = connect(&path, &others, soon()).unwrap_err();
        assert!(matches!(error, Error::PeerDenied { pid, .. } if pid == std::process::id()), "{error}");
        drop((ours, listener));
        files.assert_unchanged();
    }
}

#[test]
fn a_listener_that_denied_somebody_goes_on() {
    const TEST: &str = "a_listener_that_denied_somebody_goes_on";
    if let Some(path) = part() {
        let socket = connect(path, &own(), soon()).unwrap();
        let error = receive(&socket, &Limits::default(), soon()).unwrap_err();
        assert!(matches!(error, Error::Closed { .. }), "{error}");
        return;
    }
    let listener = Listener::private(own().pid(std::process::id())).unwrap();
    let other = Other::start(TEST, listener.path().to_str().unwrap());
    let error = listener.accept(soon()).unwrap_err();
    assert!(matches!(error, Error::PeerDenied { pid, .. } if pid == other.id()), "{error}");
    let _ours = connect(listener.path(), &own(), soon()).unwrap();
    assert_eq!(listener.accept(soon()).unwrap().1.pid, std::process::id());
    other.finish();
}

/// Another user, where this process may become one.
#[test]
fn another_user_gets_in_where_it_is_allowed_alone() {
    const TEST: &str = "another_user_gets_in_where_it_is_allowed_alone";
    const NOBODY: u32 = 65534;
    if let Some(part) = part() {
        let (expect, path) = part.split_once(' ').unwrap();
        if geteuid().is_root() {
            let nobody = Uid::from_raw(NOBODY);
            setresuid(nobody, nobody, nobody).unwrap();
        }
        let listens = own().anyone();
        match (connect(path, &listens, soon()), expect) {
            (Ok(mut socket), "connects") => assert_eq!(socket.read(&mut [0]).unwrap(), 0),
            (Err(Error::Os { source, .. }), "refused") => {
                assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied)
            }
            (result, expect) => panic!("{expect}: {result:?}"),
        }
        return;
    }
    let client = if geteuid().is_root() { NOBODY } else { own_uid() };
    let directory = Directory::new("user");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = directory.join("socket");
    let come = |expect: &str| Other::start(TEST, &format!("{expect} {}", path.display()));

    let listener = Listener::bind(&path, own().uid(client)).unwrap();
    let other = come("connects");
    let (socket, peer) = listener.accept(soon()).unwrap();
    assert_eq!((peer.pid, peer.uid), (other.id(), client));
    drop(socket);
    other.finish();
    drop(listener);

    // The mode lets it connect, and the list does not.
    let listener = Listener::bind(&path, own().uid(client + 1)).unwrap();
    let other = come("connects");
    let error = listener.accept(soon()).unwrap_err();
    assert!(matches!(error, Error::PeerDenied { uid, .. } if uid == client), "{error}");
    other.finish();
    drop(listener);

    // The mode does not let another user connect.
    let listener = Listener::bind(&path, own()).unwrap();
    let is_other = client != own_uid();
    let other = come(if is_other { "refused" } else { "connects" });
    let accepted = listener.accept(if is_other { shortly() } else { soon() });
    assert_eq!(matches!(&accepted, Err(Error::Timeout { .. })), is_other, "{accepted:?}");
    drop(accepted);
    other.finish();
}

#[test]
fn a_socket_has_its_mode_whatever_the_umask() {
    if alone("a_socket_has_its_mode_whatever_the_umask") {
        let directory = Directory::new("mode");
        let path = directory.join("socket");
        for mask in [0, 0o022, 0o077, 0o777] {
            umask(Mode::from_bits_truncate(mask));
            let gid = getegid().as_raw();
            for (allowed, expect) in [(own(), 0o600), (own().gid(gid), 0o660), (own().anyone(), 0o666)] {
                let listener = Listener::bind(&path, allowed).unwrap();
                assert_eq!(mode(&path), expect, "umask {mask:o}");
                drop(listener);
            }
        }
    }
}

#[test]
fn no_socket_ever_has_a_wider_mode_than_it_is_meant_to_have() {
    if alone("no_socket_ever_has_a_wider_mode_than_it_is_meant_to_have") {
        umask(Mode::empty());
        let directory = Directory::new("window");
        let path = directory.join("socket");
        let (is_over, seen) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let Ok(found) = fs::symlink_metadata(&path) else { continue };
                    assert_eq!(found.mode() & 0o7777, 0o600);
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            });
            for _ in 0..500 {
                drop(Listener::bind(&path, own()).unwrap());
            }
            until("a look at the socket", || {
                let listener = Listener::bind(&path, own()).unwrap();
                thread::sleep(Duration::from_millis(1));
                drop(listener);
                seen.load(Ordering::Relaxed) > 100
            });
            is_over.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn a_path_that_is_too_long_is_refused_before_anything_is_made() {
    let directory = Directory::new("long");
    let room = 107 - directory.path().as_os_str().len() - 1;
    let (longest, longer) = (directory.join(&"a".repeat(room)), directory.join(&"a".repeat(room + 1)));
    let too_long = |error: Error| assert!(matches!(error, Error::PathTooLong { length: 108, limit: 107 }), "{error}");
    too_long(Listener::bind(&longer, own()).unwrap_err());
    too_long(connect(&longer, &own(), soon()).unwrap_err());
    assert_eq!(directory.names(), [""; 0]);
    let listener = Listener::bind(&longest, own()).unwrap();
    let _client = connect(&longest, &own(), soon()).unwrap();
    listener.accept(soon()).unwrap();
}

#[test]
fn a_listener_that_was_killed_is_replaced() {
    const TEST: &str = "a_listener_that_was_killed_is_replaced";
    if let Some(path) = part() {
        let _listener = Listener::bind(path, own()).unwrap();
        thread::sleep(Duration::from_secs(60));
        return;
    }
    let directory = Directory::new("killed");
    let path = directory.join("socket");
    for _ in 0..2 {
        let other = Other::start(TEST, path.to_str().unwrap());
        until("a listener", || connect(&path, &own(), soon()).is_ok());
        assert!(is_in_use(Listener::bind(&path, own()), &path));
        other.kill();
        assert_eq!(directory.names(), ["socket", "socket.lock"]);
    }
    drop(Listener::bind(&path, own()).unwrap());
    assert_eq!(directory.names(), [""; 0]);
}

#[test]
fn a_socket_that_somebody_listens_at_is_never_replaced() {
    let directory = Directory::new("live");
    let path = directory.join("socket");
    let ours = Listener::bind(&path, own()).unwrap();
    assert!(is_in_use(Listener::bind(&path, own()), &path));
    let _waiting = fill(&path);
    assert!(is_in_use(Listener::bind(&path, own()), &path));
    ours.accept(soon()).unwrap();
    drop(ours);

    // One that knows of no lock, with room for others and without.
    let theirs = UnixListener::bind(&path).unwrap();
    assert!(is_in_use(Listener::bind(&path, own()), &path));
    assert_eq!(directory.names(), ["socket"], "the lock that was taken for nothing");
    rustix::net::listen(&theirs, 3).unwrap();
    let waiting = fill(&path);
    assert!(is_in_use(Listener::bind(&path, own()), &path));
    theirs.accept().unwrap();
    drop(waiting);
}

#[test]
fn what_is_no_socket_of_ours_is_never_replaced() {
    let directory = Directory::new("other");
    let path = directory.join("it");
    let is_refused = || {
        assert!(is_in_use(Listener::bind(&path, own()), &path));
        assert_eq!(directory.names(), ["it"]);
    };
    fs::write(&path, "text").unwrap();
    is_refused();
    assert_eq!(fs::read(&path).unwrap(), b"text");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nothing", &path).unwrap();
    is_refused();
    fs::remove_file(&path).unwrap();
    let datagrams = UnixDatagram::bind(&path).unwrap();
    is_refused();
    drop(datagrams);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    is_refused();
}

#[test]
fn a_file_in_the_place_of_the_lock_is_left_alone() {
    let directory = Directory::new("lock");
    let (path, lock) = (directory.join("socket"), directory.join("socket.lock"));
    fs::write(&lock, "text").unwrap();
    assert!(is_in_use(Listener::bind(&path, own()), &lock));
    assert_eq!(fs::read(&lock).unwrap(), b"text");
    fs::remove_file(&lock).unwrap();
    std::os::unix::fs::symlink("target", &lock).unwrap();
    assert!(matches!(Listener::bind(&path, own()), Err(Error::Os { .. })));
    assert_eq!(directory.names(), ["socket.lock"]);
}

#[test]
fn a_listener_removes_no_socket_but_its_own() {
    let directory = Directory::new("own");
    let path = directory.join("socket");
    let ours = Listener::bind(&path, own()).unwrap();
    fs::remove_file(&path).unwrap();
    // Also where the path comes back, another that takes the lock is held off.
    assert!(is_in_use(Listener::bind(&path, own()), &path));
    let theirs = UnixListener::bind(&path).unwrap();
    drop(ours);
    assert_eq!(directory.names(), ["socket"]);
    connect(&path, &own(), soon()).unwrap();
    theirs.accept().unwrap();
}

#[test]
fn of_those_that_bind_a_path_at_once_one_gets_it_and_keeps_it() {
    let directory = Directory::new("race");
    let path = directory.join("socket");
    let (holders, turns) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let deadline = soon();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while turns.load(Ordering::SeqCst) < 300 {
                    assert!(Instant::now() < deadline, "{turns:?} turns in time");
                    let listener = match Listener::bind(&path, own()) {
                        Ok(listener) => listener,
                        Err(Error::AddressInUse { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two listen at one path");
                    // What arrives by the path arrives here. Others knock, to learn whether somebody listens.
                    let client = connect(&path, &own(), soon()).unwrap();
                    assert_eq!(mode(&path), 0o600);
                    listener.accept(soon()).unwrap();
                    drop(client);
                    let turn = turns.fetch_add(1, Ordering::SeqCst);
                    holders.fetch_sub(1, Ordering::SeqCst);
                    if turn % 2 == 0 {
                        drop(listener);
                    } else {
                        leave_stale(listener, &path, &directory.join(&format!("aside-{turn}")));
                    }
                }
            });
        }
    });
}

/// Ends a listener so that its socket stays, as a process that is killed does.
fn leave_stale(listener: Listener, path: &Path, aside: &Path) {
    fs::rename(path, aside).unwrap();
    drop(listener);
    // Where somebody was faster, there is a live one: which stays.
    let _ = fs::hard_link(aside, path);
    fs::remove_file(aside).unwrap();
}

#[test]
fn a_bind_that_fails_leaves_nothing() {
    if alone("a_bind_that_fails_leaves_nothing") {
        let directory = Directory::new("fails");
        let (path, absent) = (directory.join("socket"), directory.join("absent/socket"));
        let named = |error: &Error| matches!(error, Error::Os { path: Some(path), .. } if *path == absent);
        assert!(Listener::bind(&absent, own()).is_err_and(|error| named(&error)));
        let open = OpenFiles::count();
        let mut steps = Vec::new();
        // So that the mode of a socket that has its path has to be changed.
        umask(Mode::from_bits_truncate(0o777));
        for limit in 1.. {
            setrlimit(Resource::RLIMIT_NOFILE, limit, 4096).unwrap();
            let result = Listener::bind(&path, own());
            setrlimit(Resource::RLIMIT_NOFILE, 4096, 4096).unwrap();
            match result {
                Ok(listener) => {
                    drop(listener);
                    break;
                }
                Err(Error::Os { operation, path: told, source }) => {
                    assert_eq!(source.raw_os_error(), Some(24), "{operation}: {source}");
                    assert!(operation == "make a socket" || told.as_ref() == Some(&path), "{operation}: {told:?}");
                    steps.push(operation);
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(directory.names(), [""; 0]);
            assert_eq!(OpenFiles::count(), open);
        }
        steps.dedup();
        assert_eq!(steps, ["lock the path of a socket", "make a socket", "change the mode of a socket"]);
    }
}

#[test]
fn a_private_listener_has_a_directory_that_nobody_else_may_enter() {
    const TEST: &str = "a_private_listener_has_a_directory_that_nobody_else_may_enter";
    if part().is_none() {
        let runtime = Directory::new("runtime");
        let closed = runtime.join("closed");
        fs::DirBuilder::new().mode(0o500).create(&closed).unwrap();
        let temporary = Directory::new("temporary");
        // A file is no directory, for root neither.
        let file = runtime.join("file");
        fs::write(&file, "").unwrap();
        let run = |runtime: &Path, expect: &Path| {
            let mut command = process::again(TEST, expect.to_str().unwrap());
            command.env("XDG_RUNTIME_DIR", runtime).env("TMPDIR", temporary.path());
            Other::from(command.spawn().unwrap()).finish();
        };
        run(runtime.path(), runtime.path());
        run(&file, temporary.path());
        run(Path::new("relative"), temporary.path());
        if !geteuid().is_root() {
            run(&closed, temporary.path());
        }
        assert_eq!(temporary.names(), [""; 0]);
        assert_eq!(runtime.names(), ["closed", "file"]);
        return;
    }
    umask(Mode::empty());
    let listener = Listener::private(own()).unwrap();
    let other = Listener::private(own()).unwrap();
    assert_ne!(listener.path(), other.path());
    let directory = listener.path().parent().unwrap();
    assert_eq!(mode(directory), 0o700);
    assert_eq!(mode(listener.path()), 0o600);
    assert_eq!(directory.parent().unwrap().to_str().unwrap(), part().unwrap());
    let directory = directory.to_owned();
    drop(listener);
    assert!(!directory.exists());
    assert!(other.path().exists());
}

#[test]
fn an_accept_ends_at_its_deadline() {
    let listener = Listener::private(own()).unwrap();
    let since = Instant::now();
    let error = listener.accept(shortly()).unwrap_err();
    assert!(matches!(error, Error::Timeout { operation: "accept a connection" }), "{error}");
    assert!(since.elapsed() >= Duration::from_millis(50));
    // One that has passed is no reason not to take who is there.
    let _client = connect(listener.path(), &own(), Instant::now()).unwrap();
    listener.accept(Instant::now()).unwrap();
}

#[test]
fn a_connect_waits_for_room_in_the_queue() {
    let listener = Listener::private(own()).unwrap();
    let _waiting = fill(listener.path());
    thread::scope(|scope| {
        let client = scope.spawn(|| connect(listener.path(), &own(), soon()));
        thread::sleep(Duration::from_millis(50));
        assert!(!client.is_finished());
        listener.accept(soon()).unwrap();
        client.join().unwrap().unwrap();
    });
}

#[test]
fn several_threads_accept_at_once() {
    let listener = Listener::private(own()).unwrap();
    thread::scope(|scope| {
        let accepting = [(); 8].map(|()| scope.spawn(|| listener.accept(soon())));
        let _clients = [(); 8].map(|()| connect(listener.path(), &own(), soon()).unwrap());
        for thread in accepting {
            thread.join().unwrap().unwrap();
        }
    });
}
