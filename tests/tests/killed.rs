//! Either process of an exchange killed at each of its steps: the other has a typed error at once, or the whole buffer,
//! loses nothing, and goes on serving others.
//!
//! The table of docs/wire-format.md, "When a process dies", is these two.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuvmm::ipc::{self, Error};
use cuvmm::{CUresult, Call, Limits, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::faults::When;
use cuvmm_tests::{Backend, G, Peer, open_files, require_marks, until, write_marks};

cuvmm_tests::suite!(
    an_exporter_that_is_killed_at_any_step_costs_the_importer_nothing,
    an_importer_that_is_killed_at_any_step_costs_the_exporter_nothing,
);

/// Handles pass in three batches: 16 unasked, then 32 and 12 that the importer asked for.
const CHUNKS: usize = 60;
/// What no survivor waits for: a death is heard of at once.
const PATIENCE: Duration = Duration::from_secs(30);

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// When a process is killed.
#[derive(Clone, Copy)]
enum Moment {
    /// Before its part of the exchange.
    Before,
    /// By itself, instead of its nth call of that name.
    At(Call, usize),
    /// By the other, instead of the other's nth call of that name.
    AtOthers(Call, usize),
    /// After its part.
    After,
}
use Moment::{After, At, AtOthers, Before};

/// What the survivor has of it: nothing, as the other end was closed before it could do this, or everything.
type Outcome = Result<(), &'static str>;

struct Death {
    step: &'static str,
    moment: Moment,
    outcome: Outcome,
}

const fn death(step: &'static str, moment: Moment, outcome: Outcome) -> Death {
    Death { step, moment, outcome }
}

const EXPORT: Call = Call::cuMemExportToShareableHandle;
const IMPORT: Call = Call::cuMemImportFromShareableHandle;

const HEADER: Outcome = Err("receive a header");
const HANDLES: Outcome = Err("receive handles");

/// An exporter exports the chunks of a batch, and then sends them together.
const EXPORTERS: [Death; 8] = [
    death("before the header is sent", Before, HEADER),
    death("after the header", At(EXPORT, 1), HANDLES),
    death("asked for more after the first batch", At(EXPORT, 17), HANDLES),
    death("amid the second batch", At(EXPORT, 30), HANDLES),
    death("asked for more after the second batch", At(EXPORT, 49), HANDLES),
    death("before the last batch is sent", At(EXPORT, CHUNKS), HANDLES),
    death("all is sent, and not yet accepted", AtOthers(Call::cuMemSetAccess, CHUNKS), Ok(())),
    death("it heard that all was accepted", After, Ok(())),
];

const MORE: Outcome = Err("hear that more handles are wanted");
const ACCEPTED: Outcome = Err("hear that the handles were accepted");

const IMPORTERS: [Death; 8] = [
    // Whether the header is sent before or after the death is a matter of chance.
    death("before the header is read", Before, Err("")),
    death("after the header", At(Call::cuMemAddressReserve, 1), MORE),
    death("the first batch came", At(IMPORT, 1), MORE),
    death("the second batch came", At(IMPORT, 17), MORE),
    death("amid the second batch", At(IMPORT, 40), MORE),
    death("all came, the last is not yet imported", At(IMPORT, CHUNKS), ACCEPTED),
    death("all is mapped, and not yet accepted", At(Call::cuMemSetAccess, CHUNKS), ACCEPTED),
    death("it said that all is accepted", After, Ok(())),
];

/// Does something instead of a call of this process.
fn instead_of(backend: &Backend, call: Call, nth: usize, act: impl Fn() + Send + Sync + 'static) {
    let seen = AtomicUsize::new(0);
    let meets = move |_: &[u64]| {
        if seen.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            act();
        }
        false
    };
    backend.faults.fail_when(call, meets, CUresult::UNKNOWN, When::Before);
}

/// Plays the part of an exchange in the process that is to die of it.
fn play(backend: &Backend, death: &Death, part: impl FnOnce()) -> ! {
    match death.moment {
        Before => Peer::die(),
        At(call, nth) => instead_of(backend, call, nth, || Peer::die()),
        AtOthers(..) | After => {}
    }
    part();
    if matches!(death.moment, After) {
        Peer::die();
    }
    unreachable!("{}: the process was to die", death.step)
}

/// A buffer of so many chunks of one granule.
fn chunks(resource: &VirtualMemoryResource, chunks: usize, seed: u8) -> VirtualMemoryBuffer {
    let mut buffer = resource.allocate_with_capacity(G, chunks * G).unwrap();
    for size in (2..=chunks).map(|chunks| chunks * G) {
        buffer = buffer.grow_into(size).unwrap();
    }
    assert_eq!(buffer.chunks().len(), chunks);
    write_marks(&buffer, seed);
    buffer
}

fn send(socket: &UnixStream, buffer: &VirtualMemoryBuffer) -> Result<(), Error> {
    ipc::send_buffer(socket, buffer, deadline())
}

fn receive(socket: &UnixStream, resource: &VirtualMemoryResource) -> Result<VirtualMemoryBuffer, Error> {
    ipc::receive_buffer(socket, resource, &Limits::default(), deadline())
}

/// Demands the outcome that belongs to a death.
fn require_outcome(death: &Death, result: Result<(), Error>) {
    match (result, death.outcome) {
        (Ok(()), Ok(())) => {}
        (Err(Error::Closed { operation }), Err(expected)) if expected.is_empty() || operation == expected => {}
        (result, outcome) => panic!("{}: {result:?} instead of {outcome:?}", death.step),
    }
}

/// Lives through a death of another process, with which `exchange` is the survivor's part of an exchange.
fn survive(backend: &Backend, nth: usize, death: &Death, exchange: impl FnOnce(&UnixStream) -> Result<(), Error>) {
    let peer = Peer::start(backend, &format!("victim {nth}"));
    let socket = peer.socket.try_clone().unwrap();
    // A process that is there takes the time that a driver takes to start; its death is told at once.
    let since = Instant::now();
    let result = if let AtOthers(call, nth) = death.moment {
        let victim = Mutex::new(Some(peer));
        instead_of(backend, call, nth, move || victim.lock().unwrap().take().unwrap().kill());
        let result = exchange(&socket);
        backend.faults.clear();
        result
    } else {
        let result = exchange(&socket);
        peer.await_death();
        result
    };
    assert!(since.elapsed() < PATIENCE, "{}: {:?}", death.step, since.elapsed());
    let told = result.as_ref().map_or_else(ToString::to_string, |()| "the whole buffer".to_owned());
    println!("killed {}: {told}", death.step);
    require_outcome(death, result);
}

/// What the processes of a test do.
enum Part {
    /// Lives through all the deaths.
    Survivor,
    /// Dies that one.
    Victim(usize, UnixStream),
    /// Is served after each death.
    Other(UnixStream),
}

/// The part of this process; none in the one that the test began in, which waits for the survivor, and shows what it says.
fn part(backend: &Backend) -> Option<Part> {
    let Some((role, socket)) = Peer::role() else {
        let said = Peer::start(backend, "survivor").join();
        said.lines().filter_map(|line| Some(&line[line.find("killed ")?..])).for_each(|row| println!("{row}"));
        return None;
    };
    Some(match role.split_once(' ') {
        Some(("victim", nth)) => Part::Victim(nth.parse().unwrap(), socket),
        _ if role == "other" => Part::Other(socket),
        _ => Part::Survivor,
    })
}

/// Demands that no file is open but those of before, of which some may have been about to be closed.
#[track_caller]
fn require_no_more_files(before: &[i32], step: &str) {
    until(step, || open_files().iter().all(|file| before.contains(file)));
}

fn an_exporter_that_is_killed_at_any_step_costs_the_importer_nothing(backend: &Backend) {
    let Some(part) = part(backend) else { return };
    let resource = backend.shareable();
    match part {
        Part::Victim(nth, socket) => {
            let buffer = chunks(&resource, CHUNKS, 1);
            play(backend, &EXPORTERS[nth], || send(&socket, &buffer).unwrap());
        }
        Part::Other(socket) => {
            let buffer = chunks(&resource, 17, 2);
            for _ in EXPORTERS {
                send(&socket, &buffer).unwrap();
                Peer::await_signal(&socket);
            }
            buffer.close().unwrap();
        }
        Part::Survivor => {
            let other = Peer::start(backend, "other");
            let serve = || {
                let buffer = receive(&other.socket, &resource).unwrap();
                require_marks(&buffer, 2, 17 * G);
                buffer.close().unwrap();
                Peer::signal(&other.socket);
            };
            // A first import and a first copy make what a process has once.
            let first = chunks(&resource, 1, 0);
            ipc::import(&resource, ipc::export(&first).unwrap()).unwrap().close().unwrap();
            first.close().unwrap();
            let (mark, files) = (backend.mark(), open_files());
            for (nth, death) in EXPORTERS.iter().enumerate() {
                survive(backend, nth, death, |socket| {
                    let buffer = receive(socket, &resource)?;
                    require_marks(&buffer, 1, CHUNKS * G);
                    buffer.close().unwrap();
                    Ok(())
                });
                backend.require_unchanged(&mark);
                require_no_more_files(&files, death.step);
                serve();
                require_no_more_files(&files, death.step);
            }
            other.join();
        }
    }
}

fn an_importer_that_is_killed_at_any_step_costs_the_exporter_nothing(backend: &Backend) {
    let Some(part) = part(backend) else { return };
    let resource = backend.shareable();
    match part {
        Part::Victim(nth, socket) => play(backend, &IMPORTERS[nth], || drop(receive(&socket, &resource).unwrap())),
        Part::Other(socket) => {
            for _ in IMPORTERS {
                let buffer = receive(&socket, &resource).unwrap();
                require_marks(&buffer, 3, CHUNKS * G);
                buffer.close().unwrap();
                Peer::signal(&socket);
            }
        }
        Part::Survivor => {
            let other = Peer::start(backend, "other");
            let buffer = chunks(&resource, CHUNKS, 3);
            drop(ipc::export(&buffer).unwrap());
            let (mark, files) = (backend.mark(), open_files());
            for (nth, death) in IMPORTERS.iter().enumerate() {
                survive(backend, nth, death, |socket| send(socket, &buffer));
                backend.require_unchanged(&mark);
                require_no_more_files(&files, death.step);
                send(&other.socket, &buffer).unwrap();
                Peer::await_signal(&other.socket);
                require_no_more_files(&files, death.step);
            }
            // What the dead had of it, it has still, and grows.
            require_marks(&buffer, 3, CHUNKS * G);
            let grown = buffer.grow((CHUNKS + 1) * G).unwrap();
            require_marks(&grown, 3, CHUNKS * G);
            grown.close().unwrap();
            buffer.close().unwrap();
            other.join();
        }
    }
}
