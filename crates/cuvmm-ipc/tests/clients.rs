//! A server of one buffer, and its clients.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::io::{Read, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cuvmm_ipc::{AllowedPeers, Error, Limits, Listener, connect, receive_buffer, send_buffer};
use cuvmm_resource::VirtualMemoryResource;
use process::{Other, part};
use simulated::{assert_reads, grown, leaves_nothing, shareable, write};
use support::soon;

const CLIENTS: usize = 64;

fn own() -> AllowedPeers {
    AllowedPeers::default()
}

/// One that asks for the buffer, reads it, and has it until all have it.
fn client(path: &Path, resource: &VirtualMemoryResource) {
    let mut socket = connect(path, &own(), soon()).unwrap();
    let imported = receive_buffer(&socket, resource, &Limits::default(), soon()).unwrap();
    assert_reads(&imported, 7);
    socket.write_all(b"!").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    imported.close().unwrap();
}

#[test]
fn sixty_four_clients_at_once_get_a_buffer_each_and_none_waits_for_a_silent_one() {
    leaves_nothing(|_, resource| {
        let buffer = grown(resource, 5);
        write(&buffer, 7);
        let listener = Listener::private(own()).unwrap();
        // They connect first. One says nothing, one begins to speak, and neither reads.
        let silent = connect(listener.path(), &own(), soon()).unwrap();
        let mut stammering = connect(listener.path(), &own(), soon()).unwrap();
        stammering.write_all(b"cu").unwrap();
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| client(listener.path(), resource));
            }
            let serve = || {
                let (mut socket, _) = listener.accept(soon()).unwrap();
                let buffer = &buffer;
                scope.spawn(move || -> Result<_, Error> {
                    send_buffer(&socket, buffer, soon())?;
                    socket.read_exact(&mut [0]).unwrap();
                    Ok(socket)
                })
            };
            let slow = [(); 2].map(|()| serve());
            let served = [(); CLIENTS].map(|()| serve());
            // All have it, and nobody has let go of it: the sockets end together.
            let sockets = served.map(|thread| thread.join().unwrap().unwrap());
            drop(sockets);
            assert!(slow.iter().all(|thread| !thread.is_finished()), "the slow ones are waited for all the while");
            drop((silent, stammering));
            for thread in slow {
                let error = thread.join().unwrap().unwrap_err();
                assert!(matches!(error, Error::Closed { .. }), "{error}");
            }
        });
        buffer.close().unwrap();
    });
}

#[test]
fn a_client_that_left_before_its_turn_costs_the_server_nothing() {
    leaves_nothing(|_, resource| {
        let buffer = grown(resource, 5);
        let listener = Listener::private(own()).unwrap();
        drop(connect(listener.path(), &own(), soon()).unwrap());
        let (socket, peer) = listener.accept(soon()).unwrap();
        assert_eq!(peer.pid, std::process::id());
        let error = send_buffer(&socket, &buffer, soon()).unwrap_err();
        assert!(matches!(error, Error::Closed { .. }), "{error}");
        buffer.close().unwrap();
    });
}

#[test]
fn clients_in_processes_of_their_own_see_the_same_memory() {
    const TEST: &str = "clients_in_processes_of_their_own_see_the_same_memory";
    if let Some(path) = part() {
        let bench = simulated::Bench::small();
        client(Path::new(&path), &shareable(&bench.driver, 0));
        return;
    }
    leaves_nothing(|_, resource| {
        let buffer = grown(resource, 5);
        write(&buffer, 7);
        let listener = Listener::private(own()).unwrap();
        let clients = [(); 4].map(|()| Other::start(TEST, listener.path().to_str().unwrap()));
        let sockets = clients.each_ref().map(|_| {
            let (mut socket, peer) = listener.accept(soon()).unwrap();
            assert!(clients.iter().any(|client| client.id() == peer.pid));
            send_buffer(&socket, &buffer, soon()).unwrap();
            socket.read_exact(&mut [0]).unwrap();
            socket
        });
        drop(sockets);
        clients.into_iter().for_each(Other::finish);
        buffer.close().unwrap();
    });
}
