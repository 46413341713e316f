//! What must not compile, each beside the same with one line other, or one line less, that does: so it is that line that
//! is refused, whatever a compiler's words for it are.

/// A reservation is not closed under a mapping.
///
/// ```compile_fail,E0507
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(range: Arc<Reservation>, memory: Arc<Allocation>) -> Result<(), Error> {
///     let mapping = Mapping::map(&range, 0, memory, Arc::new([]))?;
///     range.close()?; // no moving out of a share
///     mapping.close()
/// }
/// ```
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(range: Arc<Reservation>, memory: Arc<Allocation>) -> Result<(), Error> {
///     let mapping = Mapping::map(&range, 0, memory, Arc::new([]))?;
///     mapping.close()
/// }
/// ```
struct ClosedUnderAMapping;

/// Addresses are no room: nothing is mapped beyond a reservation, or in one of others.
///
/// ```compile_fail,E0308
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::CUdeviceptr;
/// # use cuvmm_handles::*;
/// fn example(room: Room, address: CUdeviceptr, memory: Arc<Allocation>) -> Result<(), Error> {
///     let room = address;
///     Mapping::map_in(room, memory, Arc::new([]))?.close()
/// }
/// ```
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::CUdeviceptr;
/// # use cuvmm_handles::*;
/// fn example(room: Room, address: CUdeviceptr, memory: Arc<Allocation>) -> Result<(), Error> {
///     Mapping::map_in(room, memory, Arc::new([]))?.close()
/// }
/// ```
struct MappedAtAddresses;

/// A room holds one mapping.
///
/// ```compile_fail,E0382
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(room: Room, memory: Arc<Allocation>) -> Result<(), Error> {
///     let mapping = Mapping::map_in(room, Arc::clone(&memory), Arc::new([]))?;
///     let again = Mapping::map_in(room, Arc::clone(&memory), Arc::new([]))?;
///     mapping.close()
/// }
/// ```
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(room: Room, memory: Arc<Allocation>) -> Result<(), Error> {
///     let mapping = Mapping::map_in(room, Arc::clone(&memory), Arc::new([]))?;
///     mapping.close()
/// }
/// ```
struct MappedTwice;

/// The whole of an allocation is mapped: there is no offset into it, which drivers refuse.
///
/// ```compile_fail,E0061
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(room: Room, memory: Arc<Allocation>) -> Result<(), Error> {
///     Mapping::map_in(
///         room,
///         memory,
///         Arc::new([]),
///         2 << 20,
///     )?.close()
/// }
/// ```
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_handles::*;
/// fn example(room: Room, memory: Arc<Allocation>) -> Result<(), Error> {
///     Mapping::map_in(
///         room,
///         memory,
///         Arc::new([]),
///     )?.close()
/// }
/// ```
struct MappedFromAnOffset;

/// What was closed is gone.
///
/// ```compile_fail,E0382
/// # use cuvmm_handles::*;
/// fn example(mapping: Mapping) -> Result<(), Error> {
///     mapping.close()?;
///     mapping.close()
/// }
/// ```
///
/// ```
/// # use cuvmm_handles::*;
/// fn example(mapping: Mapping) -> Result<(), Error> {
///     mapping.close()
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use cuvmm_handles::*;
/// fn example(range: Reservation) -> Result<(), Error> {
///     range.close()?;
///     range.close()
/// }
/// ```
///
/// ```
/// # use cuvmm_handles::*;
/// fn example(range: Reservation) -> Result<(), Error> {
///     range.close()
/// }
/// ```
struct ClosedTwice;

/// A size that nobody rounded is none.
///
/// ```compile_fail,E0308
/// # use cuvmm_driver::Driver;
/// # use cuvmm_handles::*;
/// fn example(driver: &Driver, size: GranularSize) -> Result<(), Error> {
///     let size = 3_000_000;
///     Reservation::reserve(driver, size, 0)?.close()
/// }
/// ```
///
/// ```
/// # use cuvmm_driver::Driver;
/// # use cuvmm_handles::*;
/// fn example(driver: &Driver, size: GranularSize) -> Result<(), Error> {
///     Reservation::reserve(driver, size, 0)?.close()
/// }
/// ```
struct ReservedUnrounded;
