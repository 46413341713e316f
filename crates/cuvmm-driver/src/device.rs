//! [`Device`]: what a GPU is called, what it is, and whom it reaches.
//!
//! # Safety
//! Each raw call is given outputs of its own and the device that the driver itself named.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use crate::capabilities::{HandleFile, Probes};
use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

/// What is known of a device without asking again.
pub(crate) struct Facts {
    device: CUdevice,
    uuid: OnceLock<CUuuid>,
    pub(crate) probes: Probes,
    pub(crate) posix_fd_file: OnceLock<HandleFile>,
}

impl Facts {
    pub(crate) fn new(device: CUdevice) -> Self {
        Self { device, uuid: OnceLock::new(), probes: Probes::default(), posix_fd_file: OnceLock::new() }
    }
}

/// The instruction set of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The generation.
    pub major: i32,
    /// The variant.
    pub minor: i32,
}

impl std::fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    driver: Driver,
    ordinal: i32,
}

impl Device {
    pub(crate) fn new(driver: Driver, ordinal: i32) -> Self {
        Self { driver, ordinal }
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Its number in this process; another process may number it otherwise, so send [`uuid`](Self::uuid) instead.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver's own name of it, for raw calls.
    pub fn raw(&self) -> CUdevice {
        self.driver.facts(self.ordinal).map_or(CUdevice(self.ordinal), |facts| facts.device)
    }

    /// It as a location of memory or access.
    pub fn location(&self) -> CUmemLocation {
        CUmemLocation::device(self.ordinal)
    }

    /// `cuDeviceGetName`: what it is called.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDeviceGetName")]
    pub fn name(&self) -> Result<String, Error> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the call writes at most the 255 bytes it is told of, so that the last one stays NUL.
        let code = unsafe { self.driver.calls()?.cuDeviceGetName(name.as_mut_ptr(), 255, self.raw()) };
        self.driver.check(Call::cuDeviceGetName, code)?;
        // SAFETY: the array outlives the use and ends in NUL.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// `cuDeviceGetUuid`: its identity, the same in every process (under MIG, the instance's). Asked once: it never
    /// changes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before CUDA 11.4; what the driver answers.
    #[doc(alias = "cuDeviceGetUuid")]
    pub fn uuid(&self) -> Result<CUuuid, Error> {
        let known = self.driver.facts(self.ordinal).map(|facts| &facts.uuid);
        if let Some(uuid) = known.and_then(OnceLock::get) {
            return Ok(*uuid);
        }
        let mut uuid = CUuuid::default();
        // SAFETY: the output is ours.
        let code = unsafe { self.driver.calls()?.cuDeviceGetUuid(&raw mut uuid, self.raw()) };
        self.driver.check(Call::cuDeviceGetUuid, code)?;
        // Another thread that asked meanwhile was told the same.
        Ok(known.map_or(uuid, |known| *known.get_or_init(|| uuid)))
    }

    /// `cuDeviceTotalMem`: its memory, in bytes.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDeviceTotalMem")]
    pub fn total_memory(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: the output is ours.
        let code = unsafe { self.driver.calls()?.cuDeviceTotalMem(&raw mut bytes, self.raw()) };
        self.driver.check(Call::cuDeviceTotalMem, code)?;
        Ok(bytes)
    }

    /// `cuDeviceGetAttribute`: a fact about it; none where the driver is older than the attribute.
    ///
    /// # Errors
    /// What the driver answers, but for 1, which is how it says that it does not know the attribute.
    #[doc(alias = "cuDeviceGetAttribute")]
    pub fn attribute(&self, attribute: CUdevice_attribute) -> Result<Option<i32>, Error> {
        let mut value = 0;
        // SAFETY: the output is ours.
        let code = unsafe { self.driver.calls()?.cuDeviceGetAttribute(&raw mut value, attribute, self.raw()) };
        if code == CUresult::INVALID_VALUE {
            return Ok(None);
        }
        self.driver.check(Call::cuDeviceGetAttribute, code)?;
        Ok(Some(value))
    }

    /// `cuDeviceGetPCIBusId`: where it is on the PCI bus, as `0000:3b:00.0`: domain, bus, device, function.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDeviceGetPCIBusId")]
    pub fn pci_bus_id(&self) -> Result<String, Error> {
        let mut id: [c_char; 32] = [0; 32];
        // SAFETY: the call writes at most the 31 bytes it is told of, so that the last one stays NUL.
        let code = unsafe { self.driver.calls()?.cuDeviceGetPCIBusId(id.as_mut_ptr(), 31, self.raw()) };
        self.driver.check(Call::cuDeviceGetPCIBusId, code)?;
        // SAFETY: the array outlives the use and ends in NUL.
        Ok(unsafe { CStr::from_ptr(id.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Its instruction set, by two attributes.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn compute_capability(&self) -> Result<ComputeCapability, Error> {
        let number = |attribute| Ok(self.attribute(attribute)?.unwrap_or(0));
        Ok(ComputeCapability {
            major: number(CUdevice_attribute::COMPUTE_CAPABILITY_MAJOR)?,
            minor: number(CUdevice_attribute::COMPUTE_CAPABILITY_MINOR)?,
        })
    }

    /// The NUMA node of the host next to it; none where the host has no nodes or the driver is too old to say.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn host_numa_id(&self) -> Result<Option<i32>, Error> {
        Ok(self.attribute(CUdevice_attribute::HOST_NUMA_ID)?.filter(|node| *node >= 0))
    }

    /// `cuDeviceGetP2PAttribute`: a property of the link from this device to `peer`.
    ///
    /// # Errors
    /// [`Error::DifferentDrivers`]; 101 for a device and itself, 1 for an attribute that the driver doesn't know.
    #[doc(alias = "cuDeviceGetP2PAttribute")]
    pub fn p2p_attribute(&self, attribute: CUdevice_P2PAttribute, peer: &Self) -> Result<i32, Error> {
        self.driver.require_same(&peer.driver)?;
        let mut value = 0;
        // SAFETY: the output is ours.
        let code =
            unsafe { self.driver.calls()?.cuDeviceGetP2PAttribute(&raw mut value, attribute, self.raw(), peer.raw()) };
        self.driver.check(Call::cuDeviceGetP2PAttribute, code)?;
        Ok(value)
    }

    /// `cuDeviceCanAccessPeer`: whether this device can be granted access to `peer`'s memory.
    ///
    /// # Errors
    /// [`Error::DifferentDrivers`]; what the driver answers.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    pub fn can_access_peer(&self, peer: &Self) -> Result<bool, Error> {
        self.driver.require_same(&peer.driver)?;
        let mut can = 0;
        // SAFETY: the output is ours.
        let code = unsafe { self.driver.calls()?.cuDeviceCanAccessPeer(&raw mut can, self.raw(), peer.raw()) };
        self.driver.check(Call::cuDeviceCanAccessPeer, code)?;
        Ok(can != 0)
    }
}
