//! Sockets that nobody listens at any more.
//!
//! A child that is being started has copies of all sockets, those that listen too, until it executes its program. So no
//! test here starts one: beside that, a socket that was just closed may still be one that somebody listens at.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
mod support;

use std::os::unix::net::UnixListener;

use cuvmm_ipc::{AllowedPeers, Error, Listener, connect};
use process::Directory;
use support::soon;

fn own() -> AllowedPeers {
    AllowedPeers::default()
}

#[test]
fn where_nobody_listens_a_connect_fails_at_once() {
    let directory = Directory::new("nobody");
    let path = directory.join("socket");
    let check = |expect: std::io::ErrorKind| match connect(&path, &own(), soon()) {
        Err(Error::Os { path: Some(told), source, .. }) => assert_eq!((told, source.kind()), (path.clone(), expect)),
        other => panic!("{other:?}"),
    };
    check(std::io::ErrorKind::NotFound);
    drop(UnixListener::bind(&path).unwrap());
    check(std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_socket_that_nobody_listens_at_is_replaced() {
    let directory = Directory::new("stale");
    let path = directory.join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(directory.names(), ["socket"]);
    let listener = Listener::bind(&path, own()).unwrap();
    connect(&path, &own(), soon()).unwrap();
    listener.accept(soon()).unwrap();
    drop(listener);
    assert_eq!(directory.names(), [""; 0]);
}
