//! Starting the driver, and asking what devices there are.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::machine::DeviceModel;
use crate::session::{Answer, Session};
use crate::simulator::Shared;

pub(crate) fn init(shared: &Shared, flags: u32) -> Answer {
    if flags != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    if shared.machine.devices.is_empty() {
        return Err(CUresult::NO_DEVICE);
    }
    shared.mark_initialized();
    Ok(())
}

pub(crate) fn count(session: &Session<'_>) -> i32 {
    i32::try_from(session.shared.machine.devices.len()).unwrap_or(i32::MAX)
}

pub(crate) fn get(session: &Session<'_>, ordinal: i32) -> Answer<CUdevice> {
    model(session, CUdevice(ordinal)).map(|_| CUdevice(ordinal))
}

pub(crate) fn model<'a>(session: &'a Session<'_>, device: CUdevice) -> Answer<&'a DeviceModel> {
    session.shared.machine.device(device.0).ok_or(CUresult::INVALID_DEVICE)
}

pub(crate) fn attribute(session: &Session<'_>, attribute: CUdevice_attribute, device: CUdevice) -> Answer<i32> {
    let device = model(session, device)?;
    session.shared.machine.attribute(device, attribute.0).ok_or(CUresult::INVALID_VALUE)
}

pub(crate) fn pci_bus_id(session: &Session<'_>, device: CUdevice) -> Answer<String> {
    let part = |number: CUdevice_attribute| attribute(session, number, device).unwrap_or(0);
    let (domain, bus, slot) = (
        part(CUdevice_attribute::PCI_DOMAIN_ID),
        part(CUdevice_attribute::PCI_BUS_ID),
        part(CUdevice_attribute::PCI_DEVICE_ID),
    );
    model(session, device).map(|_| format!("{domain:04X}:{bus:02X}:{slot:02X}.0"))
}

pub(crate) fn can_access_peer(session: &Session<'_>, device: CUdevice, peer: CUdevice) -> Answer<i32> {
    model(session, device)?;
    model(session, peer)?;
    Ok(i32::from(device != peer && session.shared.machine.reaches(device.0, peer.0)))
}

pub(crate) fn p2p_attribute(
    session: &Session<'_>,
    attribute: CUdevice_P2PAttribute,
    source: CUdevice,
    destination: CUdevice,
) -> Answer<i32> {
    let linked = can_access_peer(session, source, destination)?;
    if source == destination {
        return Err(CUresult::INVALID_DEVICE);
    }
    match attribute {
        CUdevice_P2PAttribute::PERFORMANCE_RANK => Ok(0),
        CUdevice_P2PAttribute::ACCESS_SUPPORTED
        | CUdevice_P2PAttribute::NATIVE_ATOMIC_SUPPORTED
        | CUdevice_P2PAttribute::CUDA_ARRAY_ACCESS_SUPPORTED => Ok(linked),
        _ => Err(CUresult::INVALID_VALUE),
    }
}
