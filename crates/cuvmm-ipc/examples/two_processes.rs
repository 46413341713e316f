//! One process makes a buffer, grows it and shares it; another imports it, reads it and answers in it.
//!
//! `cargo run -p cuvmm-ipc --example two_processes` runs on a simulated GPU; with `-- cuda`, on the first real one.

use std::error::Error;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use cuvmm_driver::Driver;
use cuvmm_ipc::{Limits, receive_buffer, send_buffer};
use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};

const MIB: usize = 1 << 20;
const QUESTION: &[u8] = b"written by the exporter";
const ANSWER: &[u8] = b"written by the importer";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let is_importer = arguments.iter().any(|argument| argument == "importer");
    let on_gpu = arguments.iter().any(|argument| argument == "cuda");
    let driver = if on_gpu { Driver::load()? } else { Simulator::new(Machine::default()).driver()? };
    let device = driver.device(0)?;
    let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    let deadline = Instant::now() + Duration::from_secs(30);
    if is_importer { import(&resource, deadline) } else { export(&resource, on_gpu, deadline) }
}

fn export(resource: &VirtualMemoryResource, on_gpu: bool, deadline: Instant) -> Result<(), Box<dyn Error>> {
    let small = resource.allocate(2 * MIB)?;
    small.copy_from_host(0, QUESTION)?;
    let buffer = small.grow_into(64 * MIB)?;
    println!("exporter: {} bytes in {} chunks at {}", buffer.size(), buffer.chunks().len(), buffer.address());

    // The other process gets its end of the socket as its standard input.
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut importer = Command::new(std::env::current_exe()?)
        .arg("importer")
        .args(on_gpu.then_some("cuda"))
        .stdin(OwnedFd::from(theirs))
        .spawn()?;
    let since = Instant::now();
    send_buffer(&ours, &buffer, deadline)?;
    println!("exporter: the other process has it after {:?}", since.elapsed());

    // It closes its end when it is done.
    ours.set_read_timeout(Some(Duration::from_secs(30)))?;
    ours.read_to_end(&mut Vec::new())?;
    let mut text = vec![0; ANSWER.len()];
    buffer.copy_to_host(buffer.size() - text.len(), &mut text)?;
    println!("exporter: reads \"{}\"", String::from_utf8_lossy(&text));
    if !importer.wait()?.success() || text != ANSWER {
        return Err("the other process failed".into());
    }
    buffer.close()?;
    Ok(())
}

fn import(resource: &VirtualMemoryResource, deadline: Instant) -> Result<(), Box<dyn Error>> {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let buffer = receive_buffer(&socket, resource, &Limits::default(), deadline)?;
    println!("importer: {} bytes in {} chunks at {}", buffer.size(), buffer.chunks().len(), buffer.address());
    let mut text = vec![0; QUESTION.len()];
    buffer.copy_to_host(0, &mut text)?;
    println!("importer: reads \"{}\"", String::from_utf8_lossy(&text));
    buffer.copy_from_host(buffer.size() - ANSWER.len(), ANSWER)?;
    buffer.close()?;
    Ok(())
}
