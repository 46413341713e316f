//! Sharing between two processes. Each test runs itself again as its second process, with one end of a socket as the
//! standard input.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cuvmm_driver::Call;
use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{BufferDescriptor, Error, Limits, export, import, receive, receive_buffer, send, send_buffer};
use nix::sys::resource::{Resource, setrlimit};
use simulated::{Bench, G, assert_reads, grown, write};
use support::{pair, soon};

const SECOND: &str = "CUVMM_IPC_SECOND_PROCESS";

/// The socket to the first process, in the second one.
fn socket_of_second() -> Option<UnixStream> {
    std::env::var_os(SECOND)?;
    Some(std::io::stdin().as_fd().try_clone_to_owned().unwrap().into())
}

/// A second process, which runs the test of that name. It is killed where the test fails.
struct Second {
    process: Child,
    socket: UnixStream,
}

impl Second {
    fn start(test: &str) -> Self {
        let (ours, theirs) = pair();
        let process = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(SECOND, "1")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { process, socket: ours }
    }

    /// Waits until it has passed that one test: a name that no test has would be a success too.
    fn finish(mut self) {
        let mut output = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.process.wait().unwrap().success(), "{output}");
        assert!(output.contains("1 passed"), "{output}");
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // Over already, unless the test failed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn signal(mut socket: &UnixStream) {
    socket.write_all(b"!").unwrap();
}

fn await_signal(mut socket: &UnixStream) {
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket.read_exact(&mut [0]).unwrap();
}

#[test]
fn two_processes_see_the_same_bytes() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if let Some(socket) = socket_of_second() {
        let imported = receive_buffer(&socket, &resource, &Limits::default(), soon()).unwrap();
        assert_reads(&imported, 1);
        write(&imported, 2);
        signal(&socket);
        await_signal(&socket);
        assert_reads(&imported, 3);
        imported.close().unwrap();
    } else {
        let second = Second::start("two_processes_see_the_same_bytes");
        let buffer = grown(&resource, 20);
        write(&buffer, 1);
        send_buffer(&second.socket, &buffer, soon()).unwrap();
        await_signal(&second.socket);
        assert_reads(&buffer, 2);
        write(&buffer, 3);
        signal(&second.socket);
        second.finish();
        assert_reads(&buffer, 3);
        buffer.close().unwrap();
    }
    drop(resource);
    bench.assert_live(&Default::default());
}

#[test]
fn memory_outlives_the_process_that_exported_it() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if let Some(socket) = socket_of_second() {
        let buffer = grown(&resource, 3);
        write(&buffer, 4);
        let descriptor = export(&buffer).unwrap();
        buffer.close().unwrap();
        send(&socket, &descriptor, soon()).unwrap();
    } else {
        let second = Second::start("memory_outlives_the_process_that_exported_it");
        let descriptor = receive(&second.socket, &Limits::default(), soon()).unwrap();
        second.finish();
        let imported = import(&resource, descriptor).unwrap();
        assert_reads(&imported, 4);
        write(&imported, 5);
        assert_reads(&imported, 5);
    }
}

#[test]
fn an_exporter_that_is_killed_takes_nothing_with_it() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if let Some(socket) = socket_of_second() {
        let buffer = grown(&resource, 3);
        write(&buffer, 6);
        send_buffer(&socket, &buffer, soon()).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    } else {
        let mut second = Second::start("an_exporter_that_is_killed_takes_nothing_with_it");
        let imported = receive_buffer(&second.socket, &resource, &Limits::default(), soon()).unwrap();
        second.process.kill().unwrap();
        second.process.wait().unwrap();
        assert_reads(&imported, 6);
        imported.close().unwrap();
        drop(resource);
        bench.assert_live(&Default::default());
    }
}

#[test]
fn an_importer_that_is_killed_holds_nothing_up() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if let Some(socket) = socket_of_second() {
        let imported = receive_buffer(&socket, &resource, &Limits::default(), soon()).unwrap();
        signal(&socket);
        std::thread::sleep(Duration::from_secs(60));
        drop(imported);
    } else {
        let mut second = Second::start("an_importer_that_is_killed_holds_nothing_up");
        let buffer = grown(&resource, 3);
        send_buffer(&second.socket, &buffer, soon()).unwrap();
        await_signal(&second.socket);
        second.process.kill().unwrap();
        second.process.wait().unwrap();
        buffer.close().unwrap();
        drop(resource);
        bench.assert_live(&Default::default());
    }
}

#[test]
fn a_process_that_dies_midway_is_a_typed_end_for_the_other() {
    if let Some(mut socket) = socket_of_second() {
        // Takes the header and goes.
        socket.read_exact(&mut vec![0; 96 + 8 * 40]).unwrap();
    } else {
        let second = Second::start("a_process_that_dies_midway_is_a_typed_end_for_the_other");
        let bench = Bench::small();
        let resource = bench.shareable();
        let buffer = grown(&resource, 40);
        let live = bench.live();
        let since = Instant::now();
        let error = send_buffer(&second.socket, &buffer, soon()).unwrap_err();
        assert!(matches!(error, Error::Closed { .. }), "{error}");
        assert!(since.elapsed() < Duration::from_secs(10));
        bench.assert_live(&live);
        assert_eq!(buffer.grow(buffer.size() + G).unwrap().chunks().len(), 41);
        second.finish();
    }
}

#[test]
fn an_importer_with_few_open_files_takes_many_chunks() {
    if let Some(socket) = socket_of_second() {
        setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
        let bench = Bench::small();
        let resource = bench.shareable();
        let imported = receive_buffer(&socket, &resource, &Limits::default(), soon()).unwrap();
        assert_eq!(imported.chunks().len(), 200);
        assert_reads(&imported, 8);
    } else {
        let second = Second::start("an_importer_with_few_open_files_takes_many_chunks");
        let bench = Bench::small();
        let buffer = grown(&bench.shareable(), 200);
        write(&buffer, 8);
        send_buffer(&second.socket, &buffer, soon()).unwrap();
        second.finish();
    }
}

#[test]
fn an_importer_that_was_refused_the_map_and_killed_holds_nothing_up() {
    let bench = Bench::small();
    let resource = bench.shareable();
    if let Some(socket) = socket_of_second() {
        let error = receive_buffer(&socket, &resource, &Limits::default(), soon()).unwrap_err();
        assert_eq!(error.call(), Some(Call::cuMemMap), "{error}");
        signal(&socket);
        std::thread::sleep(Duration::from_secs(60));
    } else {
        let mut second = Second::start("an_importer_that_was_refused_the_map_and_killed_holds_nothing_up");
        let buffer = grown(&resource, 3);
        let (mut metadata, handles) = export(&buffer).unwrap().into_parts().unwrap();
        metadata.sizes[2] += G;
        let lying = BufferDescriptor::new(metadata, handles).unwrap();
        let error = send(&second.socket, &lying, soon()).unwrap_err();
        assert!(matches!(error, Error::Refused { reason: Refusal::DRIVER, .. }), "{error}");
        await_signal(&second.socket);
        second.process.kill().unwrap();
        second.process.wait().unwrap();
        drop(lying);
        let since = Instant::now();
        buffer.close().unwrap();
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        drop(resource);
        bench.assert_live(&Default::default());
    }
}
