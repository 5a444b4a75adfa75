//! Plans of runs and of engines, in virtual time.

mod faults;
mod plans;
