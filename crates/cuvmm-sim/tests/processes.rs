//! What must hold between processes: memory is really shared, outlives its maker, and is given back by the kernel.
//!
//! The second process is this test binary again, told by a variable which part to play; an exported descriptor is
//! its standard input.

#![allow(clippy::unwrap_used, clippy::panic, clippy::multiple_unsafe_ops_per_block, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Driver, RawDriver};
use cuvmm_sim::{Machine, Simulator};

const UNIT: usize = 2 << 20;
const ROLE: &str = "CUVMM_SIM_TEST_ROLE";

fn start() -> (Simulator, Driver) {
    let simulator = Simulator::new(Machine::h200());
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

/// Another process, in some role.
struct Peer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Peer {
    fn start(role: &str, input: Stdio) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "second_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
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

#[test]
#[ignore = "the other process of the other tests"]
fn second_process() {
    // The harness writes the test's name before; what is said begins on a line of its own.
    println!();
    match std::env::var(ROLE).unwrap().as_str() {
        "import" => {
            let (simulator, driver) = start();
            let imported = driver.mem_import_posix_fd(input().as_fd_ref()).unwrap();
            let address = map(&driver, imported);
            assert!(read(&driver, address) == pattern(1));
            write(&driver, address, &pattern(2));
            assert_eq!(simulator.physical_bytes(0), 0, "counted where it was made");
        }
        "hold" => {
            let (_simulator, driver) = start();
            let imported = driver.mem_import_posix_fd(input().as_fd_ref()).unwrap();
            map(&driver, imported);
            println!("holding");
            std::thread::park();
        }
        "make" => {
            let (_simulator, driver) = start();
            let handle = make(&driver);
            let address = map(&driver, handle);
            write(&driver, address, &pattern(3));
            println!("made {}", export(&driver, handle).into_raw());
            std::thread::park();
        }
        "limit" => {
            let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
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
            assert!(driver.mem_import_posix_fd(fd.as_fd_ref()).is_ok());
            assert!(simulator.violations().is_empty());
        }
        "number" => {
            let (_simulator, driver) = start();
            let handle = make(&driver);
            // SAFETY: nobody uses the standard input here.
            drop(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(0) });
            let exported = export(&driver, handle);
            assert_ne!(exported.as_raw_fd(), 0);
            assert!(driver.mem_import_posix_fd(exported.as_fd_ref()).is_ok());
        }
        other => panic!("no role {other}"),
    }
}

/// The standard input under a number that isn't 0.
fn input() -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).unwrap()
}

/// Short forms.
trait Descriptor {
    fn as_fd_ref(&self) -> std::os::fd::BorrowedFd<'_>;
    fn into_raw(self) -> i32;
}

impl Descriptor for OwnedFd {
    fn as_fd_ref(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(self)
    }

    fn into_raw(self) -> i32 {
        std::os::fd::IntoRawFd::into_raw_fd(self)
    }
}

#[test]
fn another_process_sees_the_bytes_and_is_seen() {
    let (simulator, driver) = start();
    let handle = make(&driver);
    let address = map(&driver, handle);
    write(&driver, address, &pattern(1));
    Peer::start("import", export(&driver, handle).into()).ends_well();
    assert!(read(&driver, address) == pattern(2));
    assert!(simulator.violations().is_empty());
}

#[test]
fn memory_is_held_by_an_importer_until_that_dies() {
    let (simulator, driver) = start();
    let handle = make(&driver);
    let mut peer = Peer::start("hold", export(&driver, handle).into());
    peer.says("holding");
    // SAFETY: the handle is alive, and given back once.
    unsafe { driver.mem_release(handle) }.unwrap();
    assert_eq!(simulator.physical_bytes(0), UNIT);
    peer.kill();
    // Children that other tests fork meanwhile hold copies of what is open here, for as long as they live.
    let until = Instant::now() + Duration::from_secs(20);
    while simulator.physical_bytes(0) > 0 {
        assert!(Instant::now() < until, "the memory is still held");
        std::thread::yield_now();
    }
    assert!(simulator.live().device_bytes.is_empty());
}

#[test]
fn a_descriptor_outlives_a_killed_maker() {
    let mut peer = Peer::start("make", Stdio::null());
    let number = peer.says("made");
    let path = format!("/proc/{}/fd/{number}", peer.child.id());
    let fd: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    peer.kill();
    let (_simulator, driver) = start();
    let address = map(&driver, driver.mem_import_posix_fd(fd.as_fd_ref()).unwrap());
    drop(fd);
    assert!(read(&driver, address) == pattern(3));
}

#[test]
fn the_limit_of_open_files_answers_304() {
    Peer::start("limit", Stdio::null()).ends_well();
}

#[test]
fn a_descriptor_is_never_number_0() {
    Peer::start("number", Stdio::null()).ends_well();
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
                        nix::libc::_exit(i32::from(codes.iter().any(|code| code.0 != 3)));
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
