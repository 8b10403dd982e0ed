"""What a conversion from a Hub takes beside a download."""
