//! CPU time of this process.

/// User and system time since the process started, in seconds; `None` if the operating system does not report it.
pub fn process_cpu_seconds() -> Option<f64> {
    // The unit is 1/USER_HZ, which Linux fixes at 100 for /proc on every architecture that tokio supports.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the command in parentheses, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn work_costs_time() {
        let before = process_cpu_seconds().expect("is reported");
        let mut sum = 0_u64;
        while process_cpu_seconds().expect("is reported") < before + 0.02 {
            sum = std::hint::black_box((0..10_000_u64).fold(sum, u64::wrapping_add));
        }
    }
}
