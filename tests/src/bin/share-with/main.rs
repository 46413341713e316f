//! `share-with PYTHON`: shares memory of the first GPU with a program of another make, both ways, which is Python's
//! interpreter with `interop/python/share.py`. That turns over each bit of what it imports, and demands the same.
//!
//! One line says what became of it. The exit code is 0 where both ways passed, and 3 where that Python, or its package
//! `cuda.bindings`, is not there.
#![forbid(unsafe_code)]
// This program is part of tests: what it did not expect is to end it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use cuvmm::{Driver, HandleKind, Limits, Options, VirtualMemoryResource, ipc};

/// It was not run, as the line says.
const NOT_RUN: u8 = 3;
/// The program, and what it imports.
const SCRIPTS: [(&str, &str); 2] = [
    ("share.py", include_str!("../../../../interop/python/share.py")),
    ("cuvmm_wire.py", include_str!("../../../../interop/python/cuvmm_wire.py")),
];
/// More chunks than come unasked.
const CHUNKS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let python = env::args().nth(1).expect("share-with PYTHON");
    if let Err(reason) = find_bindings(&python) {
        println!("not run: {reason}");
        return ExitCode::from(NOT_RUN);
    }
    let scripts = Scripts::write();
    let driver = Driver::load().expect("a driver on this machine");
    let device = driver.device(0).unwrap();
    let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd)).unwrap();
    export(&resource, &python, &scripts);
    import(&resource, &python, &scripts);
    println!("{python} imported what we grew and shared, and we imported what it shared");
    ExitCode::SUCCESS
}

/// Why that Python can't be shared with, if it can't.
fn find_bindings(python: &str) -> Result<(), String> {
    match Command::new(python).args(["-c", "import cuda.bindings.driver"]).output() {
        Err(error) => Err(format!("no {python} here: {error}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{python} has no cuda.bindings: {}", said.lines().last().unwrap_or("it does not say why")))
        }
    }
}

/// The scripts, in a folder of their own as long as this lives.
struct Scripts(PathBuf);

impl Scripts {
    fn write() -> Self {
        let folder = env::temp_dir().join(format!("share-with-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        for (name, text) in SCRIPTS {
            fs::write(folder.join(name), text).unwrap();
        }
        Self(folder)
    }

    /// Starts Python for that part of it, and gives the socket to it.
    fn start(&self, python: &str, part: &str) -> (Child, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        let script: &Path = &self.0.join("share.py");
        let mut program = Command::new(python);
        program.arg("-B").arg(script).arg(part).stdin(Stdio::from(OwnedFd::from(theirs)));
        (program.spawn().unwrap(), ours)
    }
}

impl Drop for Scripts {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// What both sides write.
fn pattern(size: usize) -> Vec<u8> {
    (0..=250).cycle().take(size).collect()
}

fn turned_over(data: &[u8]) -> Vec<u8> {
    data.iter().map(|byte| !byte).collect()
}

/// We grow and share, Python imports.
fn export(resource: &VirtualMemoryResource, python: &str, scripts: &Scripts) {
    let granularity = resource.granularity().bytes();
    let mut buffer = resource.allocate_with_capacity(granularity, 2 * CHUNKS * granularity).unwrap();
    for chunks in 2..=CHUNKS {
        buffer = buffer.grow_into(chunks * granularity).unwrap();
    }
    assert_eq!(buffer.chunks().len(), CHUNKS);
    let data = pattern(buffer.size());
    buffer.copy_from_host(0, &data).unwrap();
    let (mut peer, mut socket) = scripts.start(python, "receive");
    ipc::send_buffer(&socket, &buffer, deadline()).unwrap();
    socket.read_exact(&mut [0]).expect("the other process to have turned it over");
    let mut seen = vec![0; buffer.size()];
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == turned_over(&data), "not turned over");
    assert!(peer.wait().unwrap().success(), "the other process failed");
    buffer.close().unwrap();
}

/// Python shares, we import.
fn import(resource: &VirtualMemoryResource, python: &str, scripts: &Scripts) {
    let (mut peer, mut socket) = scripts.start(python, "send");
    let buffer = ipc::receive_buffer(&socket, resource, &Limits::default(), deadline()).unwrap();
    assert_eq!(buffer.chunks().len(), 19);
    let data = pattern(buffer.size());
    let mut seen = vec![0; buffer.size()];
    buffer.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == data, "other bytes than the other process wrote");
    buffer.copy_from_host(0, &turned_over(&data)).unwrap();
    // It is the other's memory, and stays there; nobody else has it when that process ends.
    buffer.close().unwrap();
    socket.write_all(b"!").unwrap();
    assert!(peer.wait().unwrap().success(), "the other process failed");
}
