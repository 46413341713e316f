//! What must hold between processes: memory is really shared, outlives its maker, and is given back by the kernel.
//!
//! The second process is the test again, told by a variable to play the peer; an exported descriptor is its standard
//! input.

#![allow(clippy::unwrap_used, clippy::panic, clippy::multiple_unsafe_ops_per_block, reason = "tests")]

#[path = "support/every_call.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Driver, RawDriver};
use cuvmm_sim::{Machine, Simulator};
use rustix::process::{Resource, Rlimit, setrlimit};

const UNIT: usize = 2 << 20;
/// How long other processes may take to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// Names the test whose peer this process is.
const PEER: &str = "CUVMM_SIM_TEST_PEER";

fn start() -> (Simulator, Driver) {
    start_on(Machine::h200())
}

fn start_on(machine: Machine) -> (Simulator, Driver) {
    let simulator = Simulator::new(machine);
    let driver = simulator.driver().unwrap();
    let mut context = CUcontext::NULL;
    // SAFETY: the output is a local.
    let codes = unsafe {
        [driver.raw().cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0)), driver.raw().cuCtxSetCurrent(context)]
    };
    assert!(codes.iter().all(|code| code.is_success()));
    (simulator, driver)
}

fn make(driver: &Driver) -> CUmemGenericAllocationHandle {
    let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    driver.mem_create(UNIT, &CUmemAllocationProp::pinned(CUmemLocation::device(0), kind)).unwrap()
}

fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> OwnedFd {
    // SAFETY: the handle is alive.
    unsafe { driver.mem_export_posix_fd(handle) }.unwrap()
}

fn map(driver: &Driver, handle: CUmemGenericAllocationHandle) -> CUdeviceptr {
    let address = driver.mem_address_reserve(UNIT, 0, CUdeviceptr(0)).unwrap();
    let access = CUmemAccessDesc { location: CUmemLocation::device(0), flags: CUmemAccess_flags::READWRITE };
    // SAFETY: all of it was made just now.
    unsafe {
        driver.mem_map(address, UNIT, handle).unwrap();
        driver.mem_set_access(address, UNIT, &[access]).unwrap();
    }
    address
}

fn write(driver: &Driver, address: CUdeviceptr, bytes: &[u8]) {
    // SAFETY: the source is a slice.
    assert_eq!(unsafe { driver.raw().cuMemcpyHtoD(address, bytes.as_ptr().cast(), bytes.len()) }.0, 0);
}

fn read(driver: &Driver, address: CUdeviceptr) -> Vec<u8> {
    let mut bytes = vec![0; UNIT];
    // SAFETY: the destination has that many bytes.
    assert_eq!(unsafe { driver.raw().cuMemcpyDtoH(bytes.as_mut_ptr().cast(), address, UNIT) }.0, 0);
    bytes
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..UNIT).map(|index| (index % 249) as u8 ^ seed).collect()
}

/// Whether this process is the peer of a test.
fn is_peer_of(test: &str) -> bool {
    // The harness writes the test's name before; what is said begins on a line of its own.
    println!();
    std::env::var(PEER).is_ok_and(|named| named == test)
}

/// Another process, in which the same test plays the peer. It is killed when this is dropped.
struct Peer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Peer {
    fn start(test: &str, input: Stdio) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(PEER, test)
            .stdin(input)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// What it says after the next line that begins with `word`.
    fn says(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.trim().strip_prefix(word) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the other process ended without saying {word}: {:?}", self.child.wait());
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The standard input under a number that isn't 0.
fn input() -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).unwrap()
}

/// Limits this process for good.
fn limit(resource: Resource, most: u64) {
    setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) }).unwrap();
}

#[test]
fn another_process_sees_the_bytes_and_is_seen() {
    const TEST: &str = "another_process_sees_the_bytes_and_is_seen";
    let (simulator, driver) = start();
    if is_peer_of(TEST) {
        let imported = driver.mem_import_posix_fd(input().as_fd()).unwrap();
        let address = map(&driver, imported);
        assert!(read(&driver, address) == pattern(1));
        write(&driver, address, &pattern(2));
        assert_eq!(simulator.physical_bytes(0), 0, "counted where it was made");
        println!("done");
        return;
    }
    let handle = make(&driver);
    let address = map(&driver, handle);
    write(&driver, address, &pattern(1));
    let mut peer = Peer::start(TEST, export(&driver, handle).into());
    peer.says("done");
    peer.ends_well();
    assert!(read(&driver, address) == pattern(2));
    assert!(simulator.violations().is_empty());
}

#[test]
fn memory_is_held_by_an_importer_until_that_dies() {
    const TEST: &str = "memory_is_held_by_an_importer_until_that_dies";
    let (simulator, driver) = start();
    if is_peer_of(TEST) {
        let imported = driver.mem_import_posix_fd(input().as_fd()).unwrap();
        let _ = map(&driver, imported);
        println!("holding");
        std::thread::park();
    }
    let handle = make(&driver);
    let mut peer = Peer::start(TEST, export(&driver, handle).into());
    peer.says("holding");
    // SAFETY: the handle is alive, and given back once.
    unsafe { driver.mem_release(handle) }.unwrap();
    assert_eq!(simulator.physical_bytes(0), UNIT);
    assert!(!simulator.wait_released(Instant::now()), "the peer holds it");
    peer.kill();
    assert!(simulator.wait_released(Instant::now() + PATIENCE));
    assert!(simulator.live().device_bytes.is_empty());
}

#[test]
fn a_descriptor_outlives_a_killed_maker() {
    const TEST: &str = "a_descriptor_outlives_a_killed_maker";
    let (_simulator, driver) = start();
    if is_peer_of(TEST) {
        let handle = make(&driver);
        let address = map(&driver, handle);
        write(&driver, address, &pattern(3));
        println!("made {}", export(&driver, handle).into_raw_fd());
        std::thread::park();
    }
    let mut peer = Peer::start(TEST, Stdio::null());
    let number = peer.says("made");
    let path = format!("/proc/{}/fd/{number}", peer.child.id());
    let fd: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    peer.kill();
    let address = map(&driver, driver.mem_import_posix_fd(fd.as_fd()).unwrap());
    drop(fd);
    assert!(read(&driver, address) == pattern(3));
}

#[test]
fn a_fabric_handle_ends_with_its_maker_and_what_was_imported_stays() {
    const TEST: &str = "a_fabric_handle_ends_with_its_maker_and_what_was_imported_stays";
    let (_simulator, driver) = start_on(Machine::h200().with_imex());
    if is_peer_of(TEST) {
        let kind = CUmemAllocationHandleType::FABRIC;
        let properties = CUmemAllocationProp::pinned(CUmemLocation::device(0), kind);
        let handle = driver.mem_create(UNIT, &properties).unwrap();
        let address = map(&driver, handle);
        write(&driver, address, &pattern(4));
        // SAFETY: the handle is alive.
        let shared = unsafe { driver.mem_export_fabric(handle) }.unwrap();
        let digits: String = shared.data.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("made {digits}");
        std::thread::park();
    }
    let mut peer = Peer::start(TEST, Stdio::null());
    let digits = peer.says("made");
    let mut shared = CUmemFabricHandle::default();
    for (index, byte) in shared.data.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).unwrap();
    }
    // SAFETY: it is a handle of 64 bytes.
    let import = || unsafe { driver.mem_import_fabric(&shared) };
    let address = map(&driver, import().unwrap());
    peer.kill();
    assert!(read(&driver, address) == pattern(4));
    assert_eq!(import().unwrap_err().code().unwrap().0, 1);
}

#[test]
fn the_limit_of_open_files_answers_304() {
    const TEST: &str = "the_limit_of_open_files_answers_304";
    if !is_peer_of(TEST) {
        let mut peer = Peer::start(TEST, Stdio::null());
        peer.says("done");
        return peer.ends_well();
    }
    limit(Resource::Nofile, 64);
    let (simulator, driver) = start();
    let handle = make(&driver);
    let mut open = Vec::new();
    let error = loop {
        // SAFETY: the handle is alive.
        match unsafe { driver.mem_export_posix_fd(handle) } {
            Ok(fd) => open.push(fd),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code().unwrap().0, 304);
    assert!(open.len() > 40);
    let fd = open.pop().unwrap();
    open.clear();
    assert!(driver.mem_import_posix_fd(fd.as_fd()).is_ok());
    assert!(simulator.violations().is_empty());
    println!("done");
}

#[test]
fn a_limit_of_file_sizes_answers_304_and_ends_nobody() {
    const TEST: &str = "a_limit_of_file_sizes_answers_304_and_ends_nobody";
    if !is_peer_of(TEST) {
        let mut peer = Peer::start(TEST, Stdio::null());
        peer.says("done");
        return peer.ends_well();
    }
    limit(Resource::Fsize, 1 << 20);
    let (simulator, driver) = start();
    let of = |kind| CUmemAllocationProp::pinned(CUmemLocation::device(0), kind);
    let error = driver.mem_create(UNIT, &of(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR)).unwrap_err();
    assert_eq!(error.code().unwrap().0, 304);
    assert!(driver.mem_create(UNIT, &of(CUmemAllocationHandleType::NONE)).is_ok(), "what needs no file");
    assert_eq!((simulator.live().allocations, simulator.physical_bytes(0)), (1, UNIT));
    println!("done");
}

#[test]
fn whatever_is_reserved_and_made_the_process_keeps_addresses_of_its_own() {
    const TEST: &str = "whatever_is_reserved_and_made_the_process_keeps_addresses_of_its_own";
    if !is_peer_of(TEST) {
        let mut peer = Peer::start(TEST, Stdio::null());
        peer.says("done");
        return peer.ends_well();
    }
    let (_simulator, driver) = start_on(Machine::h200().without_numa());
    let host = CUmemAllocationProp::pinned(CUmemLocation::host_numa(0), CUmemAllocationHandleType::NONE);
    let mut calls = 0;
    for size in (30..=45).rev().map(|exponent| 1_usize << exponent) {
        while driver.mem_create(size, &host).is_ok() && driver.mem_address_reserve(size, 0, CUdeviceptr(0)).is_ok() {
            calls += 1;
        }
    }
    assert!(calls > 0);
    let mut own = Vec::<u8>::new();
    own.try_reserve_exact(1 << 30).unwrap();
    std::thread::spawn(|| ()).join().unwrap();
    println!("done");
}

#[test]
fn a_descriptor_is_never_number_0() {
    const TEST: &str = "a_descriptor_is_never_number_0";
    if !is_peer_of(TEST) {
        let mut peer = Peer::start(TEST, Stdio::null());
        peer.says("done");
        return peer.ends_well();
    }
    let (_simulator, driver) = start();
    let handle = make(&driver);
    // SAFETY: nobody uses the standard input here.
    drop(unsafe { OwnedFd::from_raw_fd(0) });
    let exported = export(&driver, handle);
    assert_ne!(exported.as_raw_fd(), 0);
    assert!(driver.mem_import_posix_fd(exported.as_fd()).is_ok());
    println!("done");
}

#[test]
fn a_forked_child_gets_3_for_ever_and_its_parent_is_fine() {
    let (simulator, driver) = start();
    let handle = make(&driver);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Somebody nearly always holds the lock when the process forks.
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let address = driver.mem_address_reserve(UNIT, 0, CUdeviceptr(0)).unwrap();
                // SAFETY: it was reserved just now.
                unsafe { driver.mem_address_free(address, UNIT) }.unwrap();
            }
        });
        for _ in 0..50 {
            // SAFETY: the child makes calls that touch no lock, allocates nothing, and ends at once.
            match unsafe { nix::unistd::fork() }.unwrap() {
                nix::unistd::ForkResult::Child => {
                    let mut address = CUdeviceptr(0);
                    // SAFETY: the output is a local; the child ends without running anything of its parent's.
                    unsafe {
                        let codes = [
                            simulator.cuMemRelease(handle),
                            simulator.cuMemAddressReserve(&raw mut address, UNIT, 0, CUdeviceptr(0), 0),
                            simulator.cuInit(0),
                        ];
                        let every = support::EMPTY.iter().all(|(call, make)| {
                            is_stateless(*call) || !simulator.provides(*call) || make(&simulator) == 3
                        });
                        nix::libc::_exit(i32::from(!every || codes.iter().any(|code| code.0 != 3)));
                    }
                }
                nix::unistd::ForkResult::Parent { child } => {
                    let status = nix::sys::wait::waitpid(child, None).unwrap();
                    assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    // SAFETY: the handle is alive, and given back once.
    unsafe { driver.mem_release(handle) }.unwrap();
    assert_eq!(simulator.live().allocations, 0);
}

/// Whether no state of the driver touches a call.
fn is_stateless(call: Call) -> bool {
    use Call::*;
    matches!(call, cuDriverGetVersion | cuGetErrorName | cuGetErrorString | cuGetProcAddress)
}

#[test]
fn device_memory_is_untouchable_for_the_host() {
    let (_simulator, driver) = start();
    let address = map(&driver, make(&driver));
    // SAFETY: the child reads one byte, which ends it, and nothing else.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let pointer = std::ptr::with_exposed_provenance::<u8>(address.0 as usize);
            // SAFETY: none; the read is expected to end the process.
            unsafe {
                nix::libc::signal(nix::libc::SIGSEGV, nix::libc::SIG_DFL);
                std::hint::black_box(pointer.read_volatile());
                nix::libc::_exit(0);
            }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            let by = nix::sys::signal::Signal::SIGSEGV;
            assert!(matches!(status, nix::sys::wait::WaitStatus::Signaled(_, signal, _) if signal == by), "{status:?}");
        }
    }
}
