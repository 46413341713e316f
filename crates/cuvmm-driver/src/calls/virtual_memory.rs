//! Reserve, create, map, grant, export, import, and what undoes each.
//!
//! # Safety
//! Outputs are ours and read after success only; handles, addresses and their lifetimes are the callers' promise.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

impl Driver {
    /// `cuMemAddressReserve`: takes `size` bytes of address space, at `hint` if that is free (0: anywhere). The
    /// hint is a wish, so compare the result.
    ///
    /// # Errors
    /// 1 for a size that is no positive multiple of 2 MiB, an alignment that is no power of two, a misaligned hint;
    /// 2 when so much address space can't be had.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn mem_address_reserve(&self, size: usize, alignment: usize, hint: CUdeviceptr) -> Result<CUdeviceptr, Error> {
        let mut address = CUdeviceptr::default();
        // SAFETY: the output is ours; the rest are numbers, and the hint is never read through.
        let code = unsafe { self.calls()?.cuMemAddressReserve(&raw mut address, size, alignment, hint, 0) };
        self.check(Call::cuMemAddressReserve, code)?;
        Ok(address)
    }

    /// `cuMemAddressFree`: gives a reservation back.
    ///
    /// # Safety
    /// `address` and `size` are those of one reservation of this driver, nothing is mapped in it, and nobody uses
    /// its addresses any more.
    ///
    /// # Errors
    /// 1 for any other pair, or while something is mapped in it.
    #[doc(alias = "cuMemAddressFree")]
    pub unsafe fn mem_address_free(&self, address: CUdeviceptr, size: usize) -> Result<(), Error> {
        // SAFETY: the caller owns the reservation.
        let code = unsafe { self.calls()?.cuMemAddressFree(address, size) };
        self.check(Call::cuMemAddressFree, code)
    }

    /// `cuMemCreate`: makes physical memory; its contents are undefined. The handle is one reference to it.
    ///
    /// # Errors
    /// 1 for a size that is no positive multiple of the granularity or properties that can't be had, 2 when there
    /// is not so much memory, 101 for an unknown device, 800 for a handle type that is not permitted here.
    #[doc(alias = "cuMemCreate")]
    pub fn mem_create(
        &self,
        size: usize,
        properties: &CUmemAllocationProp,
    ) -> Result<CUmemGenericAllocationHandle, Error> {
        let mut handle = CUmemGenericAllocationHandle::default();
        // SAFETY: the output is ours, and the properties outlive the call.
        let code = unsafe { self.calls()?.cuMemCreate(&raw mut handle, size, properties, 0) };
        self.check(Call::cuMemCreate, code)?;
        Ok(handle)
    }

    /// `cuMemRelease`: gives one reference back. Legal while the memory is mapped; it then lives on in its mappings.
    ///
    /// # Safety
    /// `handle` is a reference of this driver that nobody else gives back: the driver crashes on a stale one.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuMemRelease")]
    pub unsafe fn mem_release(&self, handle: CUmemGenericAllocationHandle) -> Result<(), Error> {
        // SAFETY: the caller owns the reference.
        let code = unsafe { self.calls()?.cuMemRelease(handle) };
        self.check(Call::cuMemRelease, code)
    }

    /// `cuMemMap`: maps the whole of an allocation at `address`. Nobody has access to it yet.
    ///
    /// # Safety
    /// `handle` is a live reference of this driver, and `size` bytes at `address` lie within one reservation that
    /// the caller may map into: the driver maps past the end of one, and into its neighbour.
    ///
    /// # Errors
    /// 801 for a size other than the allocation's, 1 for a range that is mapped already or misaligned, 2 without
    /// memory for page tables.
    #[doc(alias = "cuMemMap")]
    pub unsafe fn mem_map(
        &self,
        address: CUdeviceptr,
        size: usize,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<(), Error> {
        // SAFETY: the caller vouches for the range and the handle.
        let code = unsafe { self.calls()?.cuMemMap(address, size, 0, handle, 0) };
        self.check(Call::cuMemMap, code)
    }

    /// `cuMemUnmap`: takes a mapping away. It neither waits for work that uses it nor is ordered after any.
    ///
    /// # Safety
    /// The range is one mapping of the caller's, and no work that uses it is running or will run.
    ///
    /// # Errors
    /// 1 for a part of a mapping.
    #[doc(alias = "cuMemUnmap")]
    pub unsafe fn mem_unmap(&self, address: CUdeviceptr, size: usize) -> Result<(), Error> {
        // SAFETY: the caller owns the mapping and knows it idle.
        let code = unsafe { self.calls()?.cuMemUnmap(address, size) };
        self.check(Call::cuMemUnmap, code)
    }

    /// `cuMemSetAccess`: grants each named location its access to the range; locations not named keep theirs.
    ///
    /// # Safety
    /// The range is one or more whole mappings of the caller's, and work that runs on it does without what is
    /// taken away.
    ///
    /// # Errors
    /// 1 for a part of a mapping, a hole, no descriptors or a device that can't reach the memory; 801 for the host
    /// on device memory. What was granted before then stays as it was.
    #[doc(alias = "cuMemSetAccess")]
    pub unsafe fn mem_set_access(
        &self,
        address: CUdeviceptr,
        size: usize,
        access: &[CUmemAccessDesc],
    ) -> Result<(), Error> {
        // SAFETY: the descriptors outlive the call; the caller owns the mapping.
        let code = unsafe { self.calls()?.cuMemSetAccess(address, size, access.as_ptr(), access.len()) };
        self.check(Call::cuMemSetAccess, code)
    }

    /// `cuMemGetAccess`: what `location` is granted at `address`. Safe: it only asks.
    ///
    /// # Errors
    /// 1 where nothing is mapped.
    #[doc(alias = "cuMemGetAccess")]
    pub fn mem_get_access(&self, location: CUmemLocation, address: CUdeviceptr) -> Result<CUmemAccess_flags, Error> {
        let mut flags = 0_u64;
        // SAFETY: the output is ours and 64 bits wide, as the call writes it; the location outlives the call.
        let code = unsafe { self.calls()?.cuMemGetAccess(&raw mut flags, &raw const location, address) };
        self.check(Call::cuMemGetAccess, code)?;
        Ok(CUmemAccess_flags(u32::try_from(flags).unwrap_or(u32::MAX)))
    }

    /// `cuMemExportToShareableHandle`: a new file descriptor that names the memory in any process and pins it
    /// while it is open.
    ///
    /// # Safety
    /// `handle` is a live reference of this driver: it crashes on a stale one.
    ///
    /// # Errors
    /// 1 for memory that was not made for it, or that was imported; 304 at the limit of open files.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub unsafe fn mem_export_posix_fd(&self, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, Error> {
        let mut number: c_int = -1;
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the call writes one C int, and the output is one.
        let code = unsafe { self.calls()?.cuMemExportToShareableHandle((&raw mut number).cast(), handle, kind, 0) };
        self.check(Call::cuMemExportToShareableHandle, code)?;
        // SAFETY: the call succeeded, so the number is an open descriptor that is ours to close.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// `cuMemImportFromShareableHandle`: a reference to the memory that `fd` names. The descriptor stays the
    /// caller's and may be closed at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for descriptor 0, which the driver takes for a null pointer; 999 for a
    /// descriptor that is no exported handle, 101 where the memory's device is not reachable.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn mem_import_posix_fd(&self, fd: BorrowedFd<'_>) -> Result<CUmemGenericAllocationHandle, Error> {
        let number = fd.as_raw_fd();
        let call = Call::cuMemImportFromShareableHandle;
        if number == 0 {
            return Err(Error::InvalidArgument { call, reason: "descriptor 0 reads as a null pointer" });
        }
        let os_handle = std::ptr::without_provenance_mut::<c_void>(usize::try_from(number).unwrap_or(usize::MAX));
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let mut handle = CUmemGenericAllocationHandle::default();
        // SAFETY: the output is ours; for this kind the number itself is passed as the pointer.
        let code = unsafe { self.calls()?.cuMemImportFromShareableHandle(&raw mut handle, os_handle, kind) };
        self.check(call, code)?;
        Ok(handle)
    }

    /// `cuMemExportToShareableHandle`, fabric: the bytes that name the memory on every machine of the fabric. They
    /// keep nothing alive.
    ///
    /// # Safety
    /// `handle` is a live reference of this driver: it crashes on a stale one.
    ///
    /// # Errors
    /// 1 for memory that was not made for it, or that was imported.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub unsafe fn mem_export_fabric(&self, handle: CUmemGenericAllocationHandle) -> Result<CUmemFabricHandle, Error> {
        let mut shared = CUmemFabricHandle::default();
        let kind = CUmemAllocationHandleType::FABRIC;
        // SAFETY: for this kind the call writes 64 bytes, which the output has.
        let code = unsafe { self.calls()?.cuMemExportToShareableHandle((&raw mut shared).cast(), handle, kind, 0) };
        self.check(Call::cuMemExportToShareableHandle, code)?;
        Ok(shared)
    }

    /// `cuMemImportFromShareableHandle`, fabric: a reference to the memory that the bytes name.
    ///
    /// # Safety
    /// The bytes came as a fabric handle, from an export on whichever machine or from a peer that says so. That others
    /// are answered with an error is the manual's word: it was not measured but without a channel, where 801 is the
    /// answer.
    ///
    /// # Errors
    /// What the driver answers; 801 without a fabric.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub unsafe fn mem_import_fabric(&self, shared: &CUmemFabricHandle) -> Result<CUmemGenericAllocationHandle, Error> {
        let mut handle = CUmemGenericAllocationHandle::default();
        // The call takes a mutable pointer, and is given bytes of our own in case that it writes.
        let mut bytes = *shared;
        let kind = CUmemAllocationHandleType::FABRIC;
        // SAFETY: the output is ours, and for this kind the pointer is to the 64 bytes.
        let code =
            unsafe { self.calls()?.cuMemImportFromShareableHandle(&raw mut handle, (&raw mut bytes).cast(), kind) };
        self.check(Call::cuMemImportFromShareableHandle, code)?;
        Ok(handle)
    }

    /// `cuMemGetAllocationGranularity`: what sizes and addresses of such memory must be multiples of, in bytes.
    ///
    /// # Errors
    /// What the driver answers; on NVIDIA's, nonsense locations are not refused.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    pub fn mem_get_allocation_granularity(
        &self,
        properties: &CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    ) -> Result<usize, Error> {
        let mut granularity = 0;
        // SAFETY: the output is ours, and the properties outlive the call.
        let code = unsafe { self.calls()?.cuMemGetAllocationGranularity(&raw mut granularity, properties, option) };
        self.check(Call::cuMemGetAllocationGranularity, code)?;
        Ok(granularity)
    }

    /// `cuMemGetAllocationPropertiesFromHandle`: what an allocation is. An imported one answers no handle types,
    /// and the device id -2 where its device is not visible here.
    ///
    /// # Safety
    /// `handle` is a live reference of this driver.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    pub unsafe fn mem_get_allocation_properties(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<CUmemAllocationProp, Error> {
        let mut properties = CUmemAllocationProp::default();
        // SAFETY: the output is ours; the caller vouches for the handle.
        let code = unsafe { self.calls()?.cuMemGetAllocationPropertiesFromHandle(&raw mut properties, handle) };
        self.check(Call::cuMemGetAllocationPropertiesFromHandle, code)?;
        Ok(properties)
    }

    /// `cuMemRetainAllocationHandle`: a reference of one's own to the memory mapped at `address`.
    ///
    /// # Safety
    /// What is mapped there, if anything, is the caller's to share.
    ///
    /// # Errors
    /// 1 where no virtual memory is mapped.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub unsafe fn mem_retain_allocation_handle(
        &self,
        address: CUdeviceptr,
    ) -> Result<CUmemGenericAllocationHandle, Error> {
        let mut handle = CUmemGenericAllocationHandle::default();
        let address = std::ptr::without_provenance_mut(usize::try_from(address.0).unwrap_or(usize::MAX));
        // SAFETY: the output is ours; the address is looked up, not read through.
        let code = unsafe { self.calls()?.cuMemRetainAllocationHandle(&raw mut handle, address) };
        self.check(Call::cuMemRetainAllocationHandle, code)?;
        Ok(handle)
    }

    /// `cuMemGetHandleForAddressRange`: a dma-buf descriptor of a mapped range.
    ///
    /// # Safety
    /// The range is mapped memory of the caller's.
    ///
    /// # Errors
    /// 201 without a current context, as no other call of virtual memory management; 1 for a range with a hole, and for
    /// memory of the host; 801 where dma-bufs are not supported.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub unsafe fn mem_get_dma_buf(&self, address: CUdeviceptr, size: usize) -> Result<OwnedFd, Error> {
        let mut number: c_int = -1;
        let kind = CUmemRangeHandleType::DMA_BUF_FD;
        // SAFETY: for this kind the call writes one C int, and the output is one.
        let code =
            unsafe { self.calls()?.cuMemGetHandleForAddressRange((&raw mut number).cast(), address, size, kind, 0) };
        self.check(Call::cuMemGetHandleForAddressRange, code)?;
        // SAFETY: the call succeeded, so the number is an open descriptor that is ours to close.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}
