//! Weights that one process loads and others read: a server that listens at a path, and clients that connect, import the
//! weights and read them, without a copy. The server may end; who has the weights keeps them.
//!
//! `cargo run -p cuvmm --example serve` runs the server on the first GPU, and `… -- sim` on a simulated one. It starts
//! its clients itself, as this program with the server's path, and ends when it has served as many as it started.

use std::error::Error;
use std::fmt::Write;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use cuvmm::ipc::{self, AllowedPeers, Importer, Listener};
use cuvmm::{Access, Driver, HandleKind, Limits, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};

const MIB: usize = 1 << 20;
const SIZE: usize = 64 * MIB;
const CLIENTS: usize = 3;
/// How long one exchange may take, whatever the other process does.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let is_simulated = arguments.iter().any(|argument| argument == "sim");
    let driver = if is_simulated { Simulator::new(Machine::default()).driver()? } else { Driver::load()? };
    match arguments.iter().position(|argument| argument == "client") {
        Some(at) => read(&driver, arguments.get(at + 1).ok_or("a client needs the server's path")?),
        None => serve(&driver, is_simulated),
    }
}

fn serve(driver: &Driver, is_simulated: bool) -> Result<(), Box<dyn Error>> {
    let resource = VirtualMemoryResource::new(&driver.device(0)?, Options::new().handle_kind(HandleKind::PosixFd))?;
    let weights = resource.allocate(SIZE)?;
    weights.copy_from_host(0, &vec![7; SIZE])?;

    // A path of its own, where nobody but this user gets: the clients are told. `Listener::bind` takes a path that they
    // know.
    let listener = Listener::private(AllowedPeers::default())?;
    println!("server: {} MiB at {}", weights.size() / MIB, listener.path().display());
    let start = || {
        let mut client = Command::new(std::env::current_exe()?);
        client.args(is_simulated.then_some("sim")).arg("client").arg(listener.path()).spawn()
    };
    let clients: Vec<Child> = (0..CLIENTS).map(|_| start()).collect::<Result<_, _>>()?;
    hand_out(&listener, &weights)?;

    // What they imported is theirs, whatever becomes of the server.
    drop(listener);
    weights.close()?;
    println!("server: closed");
    for mut client in clients {
        if !client.wait()?.success() {
            return Err("a client failed".into());
        }
    }
    Ok(())
}

/// Serves as many as were started. A server that goes on for ever is this without the count.
fn hand_out(listener: &Listener, weights: &VirtualMemoryBuffer) -> Result<(), ipc::Error> {
    std::thread::scope(|scope| {
        let mut served = 0;
        while served < CLIENTS {
            let (socket, peer) = match listener.accept(Instant::now() + PATIENCE) {
                Ok(accepted) => accepted,
                // Somebody else's process; the next may be one of ours.
                Err(denied @ ipc::Error::PeerDenied { .. }) => {
                    eprintln!("server: {}", with_causes(&denied));
                    continue;
                }
                Err(error) => return Err(error),
            };
            served += 1;
            // A thread each: who is slow, or says nothing, holds up nobody but itself, and that until the deadline.
            scope.spawn(move || match ipc::send_buffer(&socket, weights, Instant::now() + PATIENCE) {
                Ok(()) => println!("server: process {} has the weights", peer.pid),
                Err(error) => eprintln!("server: process {} has them not: {}", peer.pid, with_causes(&error)),
            });
        }
        Ok(())
    })
}

/// What failed and why: what the system answered is a cause.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

fn read(driver: &Driver, path: &str) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + PATIENCE;
    // Its GPU may read the weights, and not write them.
    let options = Options::new().handle_kind(HandleKind::PosixFd).own_access(Access::Read);
    let resource = VirtualMemoryResource::new(&driver.device(0)?, options)?;

    let socket = ipc::connect(path, &AllowedPeers::default(), deadline)?;
    let limits = Limits { max_bytes: 1 << 30, ..Limits::default() };
    let weights = Importer::new(&resource).receive(&socket, &limits, deadline)?;

    let mut bytes = vec![0; weights.size()];
    weights.copy_to_host(0, &mut bytes)?;
    assert!(bytes.iter().all(|&byte| byte == 7));
    println!("client {}: read {} MiB at {}", std::process::id(), weights.size() / MIB, weights.address());
    weights.close()?;
    Ok(())
}
