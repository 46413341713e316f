//! What sharing costs beside the driver's calls alone: export and import of a buffer of one chunk and of many, in turn, and
//! a descriptor of one chunk moved to another process. On the simulator, or on a GPU with `CUVMM_DRIVER=cuda`.
//!
//! # Safety
//! What the raw calls name was made just before, is used by nobody else, and goes once.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the program is its own")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark stops at what it did not expect")]

use std::hint::black_box;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemGenericAllocationHandle};
use cuvmm::ipc::{export, import_from, receive, send};
use cuvmm::{Device, HandleKind, Limits, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{G, Times, benched_driver, compare};

const ROUNDS: usize = 500;
const CHUNKS: [usize; 2] = [1, 64];
/// Names the process that receives.
const RECEIVER: &str = "CUVMM_RECEIVER";
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    if std::env::var_os(RECEIVER).is_some() {
        return take_all();
    }
    // Cargo asks every benchmark for its tests.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return;
    }
    let driver = benched_driver();
    let device = driver.device(0).unwrap();
    println!("{}, times in us, {ROUNDS} rounds in turn: median and 99th percentile", device.name().unwrap());
    println!("{:<12} {:>19} {:>19}  ours / raw", "", "ours", "raw calls");
    let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd)).unwrap();
    for chunks in CHUNKS {
        let buffer = buffer_of(&resource, chunks);
        let raw = Raw::of(&device, &buffer);
        tell("export", chunks, &compare(ROUNDS, || timed(|| export(&buffer).unwrap()), || timed(|| raw.export())));
        let descriptor = export(&buffer).unwrap();
        let ours = || timed(|| import_from(&resource, &descriptor).unwrap());
        let theirs = || {
            let start = Instant::now();
            let imported = raw.import(descriptor.fds());
            let took = start.elapsed();
            raw.end(imported);
            took
        };
        tell("import", chunks, &compare(ROUNDS, ours, theirs));
    }
    println!("{:<12} {}", "move/1", moved(&resource));
}

/// How long it takes. What is made goes after that.
fn timed<T>(make: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let made = black_box(make());
    let took = start.elapsed();
    drop(made);
    took
}

fn tell(what: &str, chunks: usize, (ours, raw): &(Times, Times)) {
    let ratio = ours.median().as_secs_f64() / raw.median().as_secs_f64();
    println!("{:<12} {ours} {raw}  {ratio:.3}", format!("{what}/{chunks}"));
}

fn buffer_of(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    let buffer = resource.allocate_with_capacity(G, chunks * G).unwrap();
    (2..=chunks).fold(buffer, |buffer, chunks| buffer.grow_into(chunks * G).unwrap())
}

/// The driver's calls for the chunks of a buffer.
struct Raw {
    device: Device,
    handles: Vec<CUmemGenericAllocationHandle>,
}

/// What the driver's calls imported.
struct Imported {
    address: CUdeviceptr,
    handles: Vec<CUmemGenericAllocationHandle>,
}

impl Raw {
    fn of(device: &Device, buffer: &VirtualMemoryBuffer) -> Self {
        // SAFETY: the buffer is mapped there, and outlives what refers to it here.
        let retain = |address| unsafe { device.driver().mem_retain_allocation_handle(address) }.unwrap();
        let handles = buffer.chunks().into_iter().map(|chunk| retain(chunk.address)).collect();
        Self { device: device.clone(), handles }
    }

    fn export(&self) -> Vec<OwnedFd> {
        // SAFETY: the handles are references of ours.
        self.handles
            .iter()
            .map(|&handle| unsafe { self.device.driver().mem_export_posix_fd(handle) }.unwrap())
            .collect()
    }

    fn import<'f>(&self, files: impl ExactSizeIterator<Item = std::os::fd::BorrowedFd<'f>>) -> Imported {
        let (driver, location) = (self.device.driver(), self.device.location());
        let access = CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE };
        let address = driver.mem_address_reserve(files.len() * G, 0, CUdeviceptr(0)).unwrap();
        let mut handles = Vec::with_capacity(files.len());
        for (chunk, file) in files.enumerate() {
            let at = CUdeviceptr(address.0 + (chunk * G) as u64);
            let handle = driver.mem_import_posix_fd(file.as_fd()).unwrap();
            // SAFETY: the handle was made just now.
            let properties = unsafe { driver.mem_get_allocation_properties(handle) }.unwrap();
            assert_eq!(properties.location, location);
            // SAFETY: the addresses are reserved, and nothing is mapped there.
            unsafe { driver.mem_map(at, G, handle) }.unwrap();
            // SAFETY: it was mapped just now.
            unsafe { driver.mem_set_access(at, G, &[access]) }.unwrap();
            handles.push(handle);
        }
        Imported { address, handles }
    }

    fn end(&self, imported: Imported) {
        let (driver, size) = (self.device.driver(), imported.handles.len() * G);
        for (chunk, handle) in imported.handles.into_iter().enumerate() {
            // SAFETY: it is mapped there, and no work uses it.
            unsafe { driver.mem_unmap(CUdeviceptr(imported.address.0 + (chunk * G) as u64), G) }.unwrap();
            // SAFETY: the handle is ours.
            unsafe { driver.mem_release(handle) }.unwrap();
        }
        // SAFETY: nothing is mapped there any more.
        unsafe { driver.mem_address_free(imported.address, size) }.unwrap();
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        for &handle in &self.handles {
            // SAFETY: the references are ours.
            unsafe { self.device.driver().mem_release(handle) }.unwrap();
        }
    }
}

/// Sends a descriptor of one chunk to another process, again and again, each time until that has said that it has it.
fn moved(resource: &VirtualMemoryResource) -> Times {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let program = std::env::current_exe().unwrap();
    let mut receiver = Command::new(program).env(RECEIVER, "1").stdin(OwnedFd::from(theirs)).spawn().unwrap();
    let descriptor = export(&resource.allocate(G).unwrap()).unwrap();
    let times = Times::of(ROUNDS, || timed(|| send(&ours, &descriptor, Instant::now() + PATIENCE).unwrap()));
    drop(ours);
    assert!(receiver.wait().unwrap().success());
    times
}

/// What the receiving process does: it takes what comes, until its peer is gone.
fn take_all() {
    let input = std::io::stdin();
    loop {
        match receive(&input, &Limits::default(), Instant::now() + PATIENCE) {
            Ok(descriptor) => assert_eq!(descriptor.sizes(), [G]),
            Err(cuvmm::ipc::Error::Closed { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}
