//! Memory of Ascend NPUs, by the five calls of the vendor's runtime, in the order that its driver requires.
//!
//! 1. The exporter's driver creates a vendor's key, with its list of processes enabled.
//! 2. An importer asks the broker, which knows its identity and informs the exporter.
//! 3. The exporter puts the importer's bare thread-group id on the driver's list, and acknowledges. The importer must
//!    be running already: the driver refuses a process that has started after it was put on the list.
//! 4. Only then the vendor's key is delivered, and the importer imports by it.
//! 5. Importers close before the exporter does: otherwise their next access is a fault of the device.
//!
//! | file | concept |
//! |---|---|
//! | `driver.rs` | the calls of `libascendcl.so` |
//! | `explain.rs` | the meaning of its error numbers |
//! | `device.rs` | [`AscendDevice`] |
//! | `memory.rs` | [`AscendMemory`] |

mod device;
mod driver;
mod explain;
mod memory;

pub use device::AscendDevice;
pub use memory::AscendMemory;
