//! What the suites share: a started simulator, and the calls with plain numbers for arguments and results.
//!
//! # Safety
//! Every pointer passed is a local's, or of a slice with its length. Numbers are passed as the tests have them: the
//! simulator looks all of them up.

#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, reason = "as the header says of all")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "as above")]

use std::ffi::c_void;

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Driver, RawDriver};
use cuvmm_sim::{Machine, Preset, Simulator};

pub(crate) const MIB: usize = 1 << 20;
/// The granularity of an H200.
pub(crate) const UNIT: usize = 2 * MIB;

pub(crate) struct Gpu {
    pub(crate) simulator: Simulator,
    pub(crate) driver: Driver,
}

impl Gpu {
    pub(crate) fn new(machine: Machine) -> Self {
        let simulator = Simulator::new(machine);
        let driver = simulator.driver().unwrap();
        Self { simulator, driver }
    }

    pub(crate) fn strict() -> Self {
        Self::new(Machine::h200())
    }

    pub(crate) fn measured() -> Self {
        Self::new(Machine::h200().preset(Preset::Measured))
    }

    /// One of each preset.
    pub(crate) fn both() -> [Self; 2] {
        [Self::strict(), Self::measured()]
    }

    pub(crate) fn raw(&self) -> &dyn RawDriver {
        self.driver.raw()
    }

    /// Makes device 0's primary context current on this thread.
    pub(crate) fn with_context(self) -> Self {
        self.enter(0);
        self
    }

    pub(crate) fn enter(&self, device: i32) -> CUcontext {
        let context = self.retain_primary(device).unwrap();
        assert_eq!(unsafe { self.raw().cuCtxSetCurrent(context) }.0, 0);
        context
    }

    pub(crate) fn retain_primary(&self, device: i32) -> Result<CUcontext, u32> {
        let mut context = CUcontext::NULL;
        let code = unsafe { self.raw().cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(device)) };
        ok(code, context)
    }

    pub(crate) fn reserve(&self, size: usize, alignment: usize, hint: u64) -> Result<u64, u32> {
        self.driver.mem_address_reserve(size, alignment, CUdeviceptr(hint)).map(|address| address.0).map_err(code_of)
    }

    pub(crate) fn free(&self, address: u64, size: usize) -> u32 {
        unsafe { self.raw().cuMemAddressFree(CUdeviceptr(address), size) }.0
    }

    pub(crate) fn create_as(&self, size: usize, properties: &CUmemAllocationProp) -> Result<u64, u32> {
        self.driver.mem_create(size, properties).map(|handle| handle.0).map_err(code_of)
    }

    pub(crate) fn create(&self, size: usize) -> Result<u64, u32> {
        self.create_as(size, &device_memory(0, CUmemAllocationHandleType::NONE))
    }

    pub(crate) fn create_exportable(&self, size: usize) -> u64 {
        self.create_as(size, &device_memory(0, CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR)).unwrap()
    }

    pub(crate) fn release(&self, handle: u64) -> u32 {
        unsafe { self.raw().cuMemRelease(CUmemGenericAllocationHandle(handle)) }.0
    }

    pub(crate) fn map_with(&self, address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> u32 {
        let handle = CUmemGenericAllocationHandle(handle);
        unsafe { self.raw().cuMemMap(CUdeviceptr(address), size, offset, handle, flags) }.0
    }

    pub(crate) fn map(&self, address: u64, size: usize, handle: u64) -> u32 {
        self.map_with(address, size, 0, handle, 0)
    }

    pub(crate) fn unmap(&self, address: u64, size: usize) -> u32 {
        unsafe { self.raw().cuMemUnmap(CUdeviceptr(address), size) }.0
    }

    pub(crate) fn grant(&self, address: u64, size: usize, grants: &[CUmemAccessDesc]) -> u32 {
        unsafe { self.raw().cuMemSetAccess(CUdeviceptr(address), size, grants.as_ptr(), grants.len()) }.0
    }

    pub(crate) fn access(&self, location: CUmemLocation, address: u64) -> Result<u32, u32> {
        self.driver.mem_get_access(location, CUdeviceptr(address)).map(|flags| flags.0).map_err(code_of)
    }

    pub(crate) fn retain(&self, address: u64) -> Result<u64, u32> {
        let mut handle = CUmemGenericAllocationHandle(0);
        let address = std::ptr::without_provenance_mut(address as usize);
        let code = unsafe { self.raw().cuMemRetainAllocationHandle(&raw mut handle, address) };
        ok(code, handle.0)
    }

    pub(crate) fn export(&self, handle: u64) -> Result<std::os::fd::OwnedFd, u32> {
        unsafe { self.driver.mem_export_posix_fd(CUmemGenericAllocationHandle(handle)) }.map_err(code_of)
    }

    pub(crate) fn import(&self, fd: &impl std::os::fd::AsFd) -> Result<u64, u32> {
        self.driver.mem_import_posix_fd(fd.as_fd()).map(|handle| handle.0).map_err(code_of)
    }

    /// Reserves, maps and grants `size` bytes to device 0.
    pub(crate) fn buffer(&self, size: usize) -> Buffer {
        let handle = self.create(size).unwrap();
        self.buffer_of(handle, size)
    }

    /// Reserves, maps and grants existing memory to device 0.
    pub(crate) fn buffer_of(&self, handle: u64, size: usize) -> Buffer {
        let address = self.reserve(size, 0, 0).unwrap();
        assert_eq!(self.map(address, size, handle), 0);
        assert_eq!(self.grant(address, size, &[read_write(0)]), 0);
        Buffer { address, size, handle }
    }

    /// Unmaps, frees and releases it.
    pub(crate) fn close(&self, buffer: Buffer) {
        assert_eq!(self.unmap(buffer.address, buffer.size), 0);
        assert_eq!(self.free(buffer.address, buffer.size), 0);
        assert_eq!(self.release(buffer.handle), 0);
    }

    pub(crate) fn stream(&self, flags: CUstream_flags) -> CUstream {
        let mut stream = CUstream::NULL;
        assert_eq!(unsafe { self.raw().cuStreamCreate(&raw mut stream, flags) }.0, 0);
        stream
    }

    pub(crate) fn event(&self) -> CUevent {
        let mut event = CUevent::NULL;
        assert_eq!(unsafe { self.raw().cuEventCreate(&raw mut event, CUevent_flags::DISABLE_TIMING) }.0, 0);
        event
    }

    pub(crate) fn record(&self, event: CUevent, stream: CUstream) -> u32 {
        unsafe { self.raw().cuEventRecord(event, stream) }.0
    }

    pub(crate) fn wait_event(&self, stream: CUstream, event: CUevent) -> u32 {
        unsafe { self.raw().cuStreamWaitEvent(stream, event, 0) }.0
    }

    pub(crate) fn event_query(&self, event: CUevent) -> u32 {
        unsafe { self.raw().cuEventQuery(event) }.0
    }

    pub(crate) fn event_synchronize(&self, event: CUevent) -> u32 {
        unsafe { self.raw().cuEventSynchronize(event) }.0
    }

    pub(crate) fn event_destroy(&self, event: CUevent) -> u32 {
        unsafe { self.raw().cuEventDestroy(event) }.0
    }

    pub(crate) fn synchronize(&self, stream: CUstream) -> u32 {
        unsafe { self.raw().cuStreamSynchronize(stream) }.0
    }

    pub(crate) fn query(&self, stream: CUstream) -> u32 {
        unsafe { self.raw().cuStreamQuery(stream) }.0
    }

    pub(crate) fn destroy(&self, stream: CUstream) -> u32 {
        unsafe { self.raw().cuStreamDestroy(stream) }.0
    }

    pub(crate) fn fill(&self, address: u64, value: u8, count: usize, stream: CUstream) -> u32 {
        unsafe { self.raw().cuMemsetD8Async(CUdeviceptr(address), value, count, stream) }.0
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> u32 {
        unsafe { self.raw().cuMemcpyHtoD(CUdeviceptr(address), bytes.as_ptr().cast(), bytes.len()) }.0
    }

    pub(crate) fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, u32> {
        let mut seen = vec![0; bytes];
        let code = unsafe { self.raw().cuMemcpyDtoH(seen.as_mut_ptr().cast(), CUdeviceptr(address), bytes) };
        ok(code, seen)
    }

    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize, stream: CUstream) -> u32 {
        unsafe { self.raw().cuMemcpyDtoDAsync(CUdeviceptr(to), CUdeviceptr(from), bytes, stream) }.0
    }

    /// Queues a host function.
    pub(crate) fn host(&self, stream: CUstream, work: impl FnOnce() + Send + 'static) -> u32 {
        extern "C" fn run(data: *mut c_void) {
            let work = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            work();
        }
        let work: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(work));
        unsafe { self.raw().cuLaunchHostFunc(stream, Some(run), Box::into_raw(work).cast()) }.0
    }

    /// Holds a stream up until the gate is opened or dropped.
    pub(crate) fn hold(&self, stream: CUstream) -> Gate {
        let (gate, held) = std::sync::mpsc::channel::<()>();
        assert_eq!(self.host(stream, move || _ = held.recv()), 0);
        Gate { _closed_when_dropped: gate }
    }

    pub(crate) fn properties(&self, handle: u64) -> Result<CUmemAllocationProp, u32> {
        let mut properties = CUmemAllocationProp::default();
        let handle = CUmemGenericAllocationHandle(handle);
        let code = unsafe { self.raw().cuMemGetAllocationPropertiesFromHandle(&raw mut properties, handle) };
        ok(code, properties)
    }

    pub(crate) fn granularity(&self, properties: &CUmemAllocationProp, option: u32) -> Result<usize, u32> {
        let mut granularity = 0;
        let option = CUmemAllocationGranularity_flags(option);
        let code = unsafe { self.raw().cuMemGetAllocationGranularity(&raw mut granularity, properties, option) };
        ok(code, granularity)
    }

    /// How much is free, and how much there is.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        assert_eq!(unsafe { self.raw().cuMemGetInfo(&raw mut free, &raw mut total) }.0, 0);
        (free, total)
    }

    pub(crate) fn current(&self) -> Result<u64, u32> {
        let mut context = CUcontext::NULL;
        let code = unsafe { self.raw().cuCtxGetCurrent(&raw mut context) };
        ok(code, context.0.addr() as u64)
    }

    pub(crate) fn set_current(&self, context: CUcontext) -> u32 {
        unsafe { self.raw().cuCtxSetCurrent(context) }.0
    }

    pub(crate) fn is_active(&self, device: i32) -> bool {
        let (mut flags, mut active) = (0, 0);
        let device = CUdevice(device);
        assert_eq!(unsafe { self.raw().cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) }.0, 0);
        active != 0
    }

    pub(crate) fn attribute(&self, address: u64, attribute: CUpointer_attribute) -> Result<u64, u32> {
        let mut data = 0_u64;
        let code = unsafe { self.raw().cuPointerGetAttribute((&raw mut data).cast(), attribute, CUdeviceptr(address)) };
        ok(code, data)
    }

    /// Several attributes at once: the code, and what is in their places, of which all bits were set, or the low
    /// ones of a narrow attribute that was written.
    pub(crate) fn attributes(&self, address: u64, asked: &[CUpointer_attribute]) -> (u32, Vec<u64>) {
        let mut attributes = asked.to_vec();
        let mut data = vec![u64::MAX; asked.len()];
        let mut places: Vec<*mut c_void> = data.iter_mut().map(|place| (&raw mut *place).cast()).collect();
        let (count, address) = (asked.len() as u32, CUdeviceptr(address));
        let code =
            unsafe { self.raw().cuPointerGetAttributes(count, attributes.as_mut_ptr(), places.as_mut_ptr(), address) };
        if code.is_success() {
            for (value, attribute) in data.iter_mut().zip(asked) {
                *value &= match *attribute {
                    CUpointer_attribute::MAPPED => 0xFF,
                    CUpointer_attribute::MEMORY_TYPE => 0xFFFF_FFFF,
                    _ => u64::MAX,
                };
            }
        }
        (code.0, data)
    }

    pub(crate) fn range_of(&self, address: u64) -> Result<(u64, usize), u32> {
        let (mut base, mut size) = (CUdeviceptr(0), 0);
        let code = unsafe { self.raw().cuMemGetAddressRange(&raw mut base, &raw mut size, CUdeviceptr(address)) };
        ok(code, (base.0, size))
    }

    /// What is undefined happened, as text.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.simulator.violations().iter().map(ToString::to_string).collect()
    }
}

/// What holds a stream up.
pub(crate) struct Gate {
    _closed_when_dropped: std::sync::mpsc::Sender<()>,
}

impl Gate {
    pub(crate) fn open(self) {}
}

/// Memory that is mapped and granted.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) size: usize,
    pub(crate) handle: u64,
}

pub(crate) fn device_memory(device: i32, kinds: CUmemAllocationHandleType) -> CUmemAllocationProp {
    CUmemAllocationProp::pinned(CUmemLocation::device(device), kinds)
}

pub(crate) fn grant(location: CUmemLocation, flags: u32) -> CUmemAccessDesc {
    CUmemAccessDesc { location, flags: CUmemAccess_flags(flags) }
}

pub(crate) fn read_write(device: i32) -> CUmemAccessDesc {
    grant(CUmemLocation::device(device), 3)
}

pub(crate) fn code_of(error: cuvmm_driver::Error) -> u32 {
    error.code().unwrap().0
}

pub(crate) fn ok<T>(code: CUresult, value: T) -> Result<T, u32> {
    if code.is_success() { Ok(value) } else { Err(code.0) }
}
