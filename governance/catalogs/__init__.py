"""Control frameworks as versioned data, with source and date."""
